// Several sequences in one engine: each question is a row of the same steps.
//
//   several_answers MODEL "What is 2 + 2?" "Name a colour." ...
#include <pianola/engine.h>
#include <pianola/generator.h>
#include <pianola/model.h>

#include <algorithm>
#include <iostream>
#include <string_view>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 3 || std::string_view(argv[1]) == "--help") {
    std::cout << "usage: several_answers MODEL PROMPT...\n";
    return argc >= 2 && std::string_view(argv[1]) == "--help" ? 0 : 2;
  }
  try {
    const auto model = pianola::Model::open(argv[1]);
    std::vector<pianola::GenerationRequest> requests;
    for (int i = 2; i < argc; ++i) {
      requests.push_back({.prompt = model.encode_chat({{"user", argv[i]}}), .max_tokens = 32});
    }
    // A slot for each, at most four: further requests wait for a free one.
    const int slots = std::min(4, static_cast<int>(requests.size()));
    pianola::Engine engine(model.causal(), {.max_seq_len = 1024, .slots = slots});

    // The callback sees every piece as it is made; returning false would cancel that request.
    std::size_t pieces = 0;
    const auto results =
        pianola::generate(engine, model, requests, [&](std::size_t, const pianola::Piece&) {
          ++pieces;
          return true;
        });
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto& result = results[i];
      std::cout << "> " << argv[i + 2] << '\n'
                << (result.error.empty() ? result.text : result.error) << "\n\n";
    }
    // What prompts have in common, a system prompt above all, is computed once.
    int prompts = 0;
    int reused = 0;
    for (const auto& result : results) {
      prompts += result.stats.prompt_tokens;
      reused += result.stats.reused_tokens;
    }
    std::cout << pieces << " pieces from " << engine.counters().steps << " steps; of " << prompts
              << " prompt tokens " << reused << " were another's too\n";
    return 0;
  } catch (const pianola::Error& error) {
    std::cerr << error.what() << '\n';
    return error.exit_code();
  }
}
