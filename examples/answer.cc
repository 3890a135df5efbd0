// One answer from a model, printed as it is made.
//
//   answer MODEL "Why is the sky blue?" [most tokens]
#include <pianola/engine.h>
#include <pianola/generator.h>
#include <pianola/model.h>

#include <cstdlib>
#include <iostream>
#include <string_view>

int main(int argc, char** argv) {
  if (argc < 3 || std::string_view(argv[1]) == "--help") {
    std::cout << "usage: answer MODEL PROMPT [most tokens]\n";
    return argc >= 2 && std::string_view(argv[1]) == "--help" ? 0 : 2;
  }
  try {
    // Reads the headers; the engine loads the weights and records the steps, once.
    const auto model = pianola::Model::open(argv[1]);
    pianola::Engine engine(model.causal(), {.max_seq_len = 2048});

    pianola::Generator answer(engine, model,
                              {.prompt = model.encode_chat({{"user", argv[2]}}),
                               .sampling = model.default_sampling(),
                               .max_tokens = argc > 3 ? std::atoi(argv[3]) : 200});
    for (const pianola::Piece& piece : answer) std::cout << piece.text << std::flush;

    const auto& stats = answer.stats();
    std::cout << "\n[" << pianola::finish_reason_name(answer.finish_reason()) << ": "
              << stats.prompt_tokens << " tokens in, " << stats.generated_tokens << " out]\n";
    return 0;
  } catch (const pianola::Error& error) {
    std::cerr << error.what() << '\n';
    return error.exit_code();
  }
}
