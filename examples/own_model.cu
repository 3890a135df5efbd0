// Your own kernels over pianola's static cache: captured once, replayed a round at a time, then run
// as one launch. The model is in own_model.cuh.
//
//   own_model [most tokens]
#include <pianola/cache.h>
#include <pianola/graph.h>

#include <cstdlib>
#include <iostream>
#include <string_view>

#include "own_model.cuh"

namespace {

void print(const char* how, const std::vector<std::int32_t>& tokens) {
  std::cout << how;
  for (const std::int32_t token : tokens) std::cout << ' ' << token;
  std::cout << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "--help") {
    std::cout << "usage: own_model [most tokens]\n";
    return 0;
  }
  const int most = argc > 1 ? std::atoi(argv[1]) : 40;
  try {
    const auto options = own_model::cache_options(512, 1);
    std::cout << pianola::StaticKvCache::plan(options).to_string();
    pianola::StaticKvCache cache(options);
    own_model::Model model(cache);

    pianola::GraphRunner runner(cache);
    runner.capture(
        [&](pianola::CudaStream stream, pianola::LoopWords* loop) { model.forward(stream, loop); });

    model.start(0, {72, 101, 108}, most);
    int launches = 1;
    while (runner.replay()) ++launches;
    const auto replayed = model.text(0);
    print("replayed:", replayed);

    model.start(0, {72, 101, 108}, most);
    const pianola::LoopResult result = runner.run(1000);
    const auto looped = model.text(0);
    print("looped:  ", looped);

    std::cout << launches << " launches, and 1 launch of " << result.rounds
              << " rounds: " << (replayed == looped ? "the same tokens\n" : "DIFFERENT TOKENS\n");
    return replayed == looped ? 0 : 1;
  } catch (const pianola::Error& error) {
    std::cerr << error.what() << '\n';
    return error.exit_code();
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
