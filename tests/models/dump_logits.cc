// Writes the logits of the SmolLM2 golden's text for tools/golden/kl_compare.py.
//
//   cmake --build build/release --target dump_logits
//   build/release/tests/dump_logits MODEL.gguf OUT.f32 [BACKEND [CACHE_TYPE [THREADS]]]
//   python tools/golden/kl_compare.py pianola=OUT.f32
//
// OUT is little-endian float32 [tokens, vocab_size], one window from position 0.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "models/golden.h"
#include "models/model.h"
#include "pianola/engine.h"

int main(int argc, char** argv) try {
  if (argc < 3) {
    std::fprintf(stderr, "usage: dump_logits MODEL OUT [BACKEND [CACHE_TYPE [THREADS]]]\n");
    return 2;
  }
  const std::filesystem::path path = pianola::golden_folder() / "smollm2" / "golden.json";
  const boost::json::value golden =
      pianola::parse_json(pianola::read_text_file(path, 1 << 20), path.string());
  const std::vector<std::int32_t> tokens = pianola::read_ids(golden.at("tokens"));
  pianola::Engine engine(pianola::CausalModel::open(argv[1]),
                         {.backend = argc > 3 ? argv[3] : "cpu",
                          .threads = argc > 5 ? std::atoi(argv[5]) : 2,
                          .max_seq_len = static_cast<int>(tokens.size()),
                          .cache_type = argc > 4 ? argv[4] : "f16",
                          .logits = true});
  std::ofstream out(argv[2], std::ios::binary);
  const int row = engine.open_row({});
  for (std::size_t begin = 0; begin < tokens.size();) {
    const std::size_t count =
        std::min(tokens.size() - begin, static_cast<std::size_t>(engine.logits_chunk()));
    const auto logits = engine.logits(row, std::span(tokens).subspan(begin, count));
    out.write(reinterpret_cast<const char*>(logits.data()),
              static_cast<std::streamsize>(logits.size_bytes()));
    begin += count;
  }
  out.close();
  if (!out) {
    std::fprintf(stderr, "%s: cannot write\n", argv[2]);
    return 1;
  }
  return 0;
} catch (const pianola::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return error.exit_code();
}
