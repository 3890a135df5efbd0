// A user's kernels over StaticKvCache and GraphRunner, with the model of examples/own_model.cu: a
// round is the same eager, replayed and in a loop; what breaks a capture is refused by name, and
// the runner goes on with what it had.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../examples/own_model.cuh"
#include "backends/cuda/cuda_error.h"
#include "expect_error.h"

namespace pianola {
namespace {

using own_model::Model;
using Tokens = std::vector<std::int32_t>;

__global__ void set_word(std::int32_t* word, std::int32_t value) { *word = value; }

__global__ void ask_again(LoopWords* loop) { loop->again = 1; }

__global__ void count_round(std::int32_t* rounds, LoopWords* loop) {
  ++*rounds;
  loop->again = 1;
}

__global__ void indices(std::size_t* out, int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) out[i] = kv_index(i * 7, i % 3, 3, 24);
}

struct Stream {
  Stream() { cuda::check(cudaStreamCreateWithFlags(&get, cudaStreamNonBlocking), "stream"); }
  ~Stream() { cudaStreamDestroy(get); }
  cudaStream_t get = nullptr;
};

struct Event {
  Event() { cuda::check(cudaEventCreateWithFlags(&get, cudaEventDisableTiming), "event"); }
  ~Event() { cudaEventDestroy(get); }
  cudaEvent_t get = nullptr;
};

// A cache, a model over it, and a runner that has captured it.
struct Running {
  explicit Running(int max_seq_len = 300, int slots = 3, const GraphRunnerOptions& options = {})
      : cache(own_model::cache_options(max_seq_len, slots)), model(cache), runner(cache, options) {
    runner.capture(forward());
  }
  GraphRunner::Forward forward() {
    return [this](CudaStream stream, LoopWords* loop) { model.forward(stream, loop); };
  }
  // Lengths that end at and around the edges of blocks.
  void start() {
    model.start(0, {1, 2, 3}, 66);
    model.start(1, {200}, 131);
    model.start(2, {9, 9, 9, 9, 9, 9, 9, 9, 9}, 64);
  }
  std::vector<Tokens> texts() const { return {model.text(0), model.text(1), model.text(2)}; }
  std::vector<Tokens> replayed() {
    start();
    while (runner.replay()) {
    }
    return texts();
  }

  StaticKvCache cache;
  Model model;
  GraphRunner runner;
};

TEST(OwnModel, EagerReplayAndLoopAreEqual) {
  Running s;
  const std::vector<Tokens> want = s.replayed();
  EXPECT_EQ(want[0].size(), 66U);
  EXPECT_EQ(want[1].size(), 131U);
  EXPECT_EQ(want[2].size(), 64U);
  EXPECT_EQ(s.cache.length(0), 65);
  EXPECT_EQ(s.cache.length(1), 130);
  EXPECT_EQ(s.cache.length(2), 63);
  for (const Tokens& text : want) {  // a model that says one word would prove little
    Tokens distinct = text;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    EXPECT_GT(distinct.size(), 5U);
  }

  s.start();
  int rounds = 1;
  while (s.runner.eager()) ++rounds;
  EXPECT_EQ(s.texts(), want);
  EXPECT_EQ(rounds, 130);

  s.start();
  const LoopResult result = s.runner.run(1000);
  EXPECT_EQ(result.end, LoopEnd::kDone);
  EXPECT_EQ(result.rounds, 130);
  EXPECT_EQ(s.texts(), want);

  // In pieces, by turns.
  s.start();
  EXPECT_TRUE(s.runner.replay());
  const LoopResult first = s.runner.run(7);
  EXPECT_EQ(first.end, LoopEnd::kBound);
  EXPECT_EQ(first.rounds, 7);
  EXPECT_TRUE(s.runner.eager());
  EXPECT_EQ(s.runner.run(1000).rounds, 130 - 9);
  EXPECT_EQ(s.texts(), want);
}

TEST(OwnModel, AloneAsWithOthers) {
  Running s;
  const std::vector<Tokens> want = s.replayed();
  Running alone(300, 1);
  alone.model.start(0, {200}, 131);
  EXPECT_EQ(alone.runner.run(1000).end, LoopEnd::kDone);
  EXPECT_EQ(alone.model.text(0), want[1]);
}

TEST(OwnModel, NothingIsStoredOrReadBeyondALength) {
  Running s;
  const std::vector<Tokens> want = s.replayed();
  const auto look = [&](int slot, int position) {
    bool any = false;
    for (int l = 0; l < own_model::kLayers; ++l) {
      const own_model::Layer layer = s.cache.layer<__half>(l);
      for (int head = 0; head < own_model::kKvHeads; ++head) {
        for (const __half* at :
             {layer.key(slot, position, head), layer.value(slot, position, head)}) {
          std::vector<unsigned char> bytes(own_model::kHeadDim * sizeof(__half));
          cuda::check(cudaMemcpy(bytes.data(), at, bytes.size(), cudaMemcpyDeviceToHost), "read");
          any |= std::any_of(bytes.begin(), bytes.end(), [](unsigned char b) { return b != 0; });
        }
      }
    }
    return any;
  };
  for (int slot = 0; slot < 3; ++slot) {
    const int length = s.cache.length(slot);
    for (const int position : {0, 1, length - 1}) EXPECT_TRUE(look(slot, position)) << position;
    for (const int position : {length, length + 1, 319}) {
      EXPECT_FALSE(look(slot, position)) << position;
    }
  }
  // NaN everywhere: a used slot, and one never used, are as good as new.
  for (int l = 0; l < own_model::kLayers; ++l) {
    const own_model::Layer layer = s.cache.layer<__half>(l);
    const std::size_t bytes = 3 * layer.slot_index(1, layer.key_dim) * sizeof(__half);
    cuda::check(cudaMemset(layer.keys, 0xff, bytes), "poison");
    cuda::check(cudaMemset(layer.values, 0xff, bytes), "poison");
  }
  EXPECT_EQ(s.replayed(), want);
}

TEST(OwnModel, GoingBackAndOnGivesTheSame) {
  Running s;
  const std::vector<Tokens> want = s.replayed();
  for (const int n : {0, 1, 40, 63, 64, 65}) {
    s.cache.keep_first(1, n);
    EXPECT_EQ(s.cache.length(1), n);
    s.model.set_known(1, n + 1);
    EXPECT_EQ(s.runner.run(1000).rounds, 130 - n);
    EXPECT_EQ(s.texts(), want) << n;
  }
  s.cache.drop_last(1, 100);
  EXPECT_EQ(s.cache.length(1), 30);
  s.model.set_known(1, 31);
  while (s.runner.replay()) {
  }
  EXPECT_EQ(s.texts(), want);
  expect_error(ErrorCode::kContextOverflow, "slot 1 holds 130",
               [&] { s.cache.keep_first(1, 131); });
  s.cache.reset(1);
  EXPECT_EQ(s.cache.length(1), 0);
  EXPECT_EQ(s.cache.length(0), 65);
}

TEST(OwnModel, IndexOnTheDeviceIsThatOfTheHost) {
  constexpr int kCount = 200;
  std::size_t* out = nullptr;
  cuda::check(cudaMallocManaged(&out, kCount * sizeof(std::size_t)), "memory");
  indices<<<1, 256>>>(out, kCount);
  cuda::check(cudaDeviceSynchronize(), "indices");
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(out[i], kv_index(i * 7, i % 3, 3, 24));
  cudaFree(out);
}

// Each of these is refused with a code and words; then the runner replays what it had captured.
class Refused : public testing::Test {
 protected:
  void refuse(ErrorCode code, const std::string& part, GraphRunner::Forward forward) {
    SCOPED_TRACE(part);
    expect_error(code, part, [&] { running_.runner.capture(std::move(forward)); });
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_TRUE(running_.runner.captured());
    EXPECT_EQ(running_.replayed(), want_);
    running_.start();
    EXPECT_EQ(running_.runner.run(1000).end, LoopEnd::kDone);
    EXPECT_EQ(running_.texts(), want_);
  }
  // The model's round, and something more.
  GraphRunner::Forward with(std::function<void(CudaStream)> more) {
    return [this, more = std::move(more)](CudaStream stream, LoopWords* loop) {
      more(stream);
      running_.model.forward(stream, loop);
    };
  }

  // The same, the other way round: what fails is the last call.
  GraphRunner::Forward ending_with(std::function<void(CudaStream)> more) {
    return [this, more = std::move(more)](CudaStream stream, LoopWords* loop) {
      running_.model.forward(stream, loop);
      more(stream);
    };
  }

  Running running_;
  std::vector<Tokens> want_ = running_.replayed();
};

constexpr auto kArgument = ErrorCode::kInvalidArgument;

TEST_F(Refused, Allocation) {
  std::vector<void*> allocated;
  const auto allocate = [&](CudaStream) {
    void* p = nullptr;
    if (cudaMalloc(&p, 1 << 20) == cudaSuccess) allocated.push_back(p);
  };
  refuse(kArgument, "allocates or frees memory", with(allocate));
  refuse(kArgument, "allocates or frees memory", with([](CudaStream stream) {
           void* p = nullptr;
           own_model::check(cudaMallocAsync(&p, 1 << 20, stream));
           own_model::check(cudaFreeAsync(p, stream));
         }));
  for (void* p : allocated) cudaFree(p);
}

TEST_F(Refused, Waiting) {
  refuse(kArgument, "waits for the device", with([](CudaStream) { cudaDeviceSynchronize(); }));
  refuse(kArgument, "waits for the device",
         with([](CudaStream stream) { cudaStreamSynchronize(stream); }));
  // The words of a forward that checks its calls come through.
  refuse(kArgument, "the forward says: ", with([](CudaStream stream) {
           own_model::check(cudaStreamSynchronize(stream));
         }));
  // By the default stream, or by waiting: CUDA's choice.
  std::int32_t length = 0;
  refuse(kArgument, "graph: the forward", with([&](CudaStream) {
           cudaMemcpy(&length, running_.cache.lengths(), sizeof(length), cudaMemcpyDeviceToHost);
         }));
}

TEST_F(Refused, StreamsThatAreNotCaptured) {
  const auto word = [this] { return running_.cache.lengths(); };
  refuse(kArgument, "default stream", with([&](CudaStream) { set_word<<<1, 1>>>(word(), 0); }));
  // Nothing is launched where it should be, or nothing at all.
  const Stream other;
  refuse(kArgument, "is not captured",
         [&](CudaStream, LoopWords* loop) { running_.model.forward(other.get, loop); });
  refuse(kArgument, "launches nothing", [](CudaStream, LoopWords*) {});
  // One kernel of the round on another stream: it ran, which its writes tell.
  refuse(kArgument, "wrote to the cache",
         with([&](CudaStream) { set_word<<<1, 1, 0, other.get>>>(word(), 17); }));
  // A stream that was forked from the captured one, and not joined.
  const Event event;
  refuse(kArgument, "joined again", with([&](CudaStream stream) {
           own_model::check(cudaEventRecord(event.get, stream));
           own_model::check(cudaStreamWaitEvent(other.get, event.get, 0));
           ask_again<<<1, 1, 0, other.get>>>(nullptr);
         }));
  // An event from before the capture.
  const Event before;
  own_model::check(cudaEventRecord(before.get, other.get));
  refuse(kArgument, "began outside",
         ending_with([&](CudaStream stream) { cudaStreamWaitEvent(stream, before.get, 0); }));
}

TEST_F(Refused, CallsThatFailAndExceptions) {
  refuse(kArgument, "a CUDA call of the forward failed: invalid",
         [](CudaStream stream, LoopWords*) { set_word<<<1, 4096, 0, stream>>>(nullptr, 0); });
  refuse(kArgument, "holds f16 and was asked for as f32",
         with([this](CudaStream) { running_.cache.layer<float>(0); }));
  refuse(kArgument, "no forward", nullptr);
  EXPECT_THROW(
      running_.runner.capture([](CudaStream, LoopWords*) { throw std::out_of_range("x"); }),
      std::out_of_range);
  EXPECT_EQ(running_.replayed(), want_);
}

TEST_F(Refused, AHostFunctionInALoop) {
  const auto host = with([](CudaStream stream) {
    own_model::check(cudaLaunchHostFunc(stream, [](void*) {}, nullptr));
  });
  refuse(ErrorCode::kUnsupported, "a host function", host);
  GraphRunner steps(running_.cache, {.loop = false});
  expect_error(kArgument, "nothing has been captured", [&] { steps.replay(); });
  steps.capture(host);
  running_.start();
  while (steps.replay()) {
  }
  EXPECT_EQ(running_.texts(), want_);
  expect_error(kArgument, "the loop was not captured", [&] { steps.run(1); });
}

TEST_F(Refused, AMovedCache) {
  StaticKvCache elsewhere(std::move(running_.cache));
  for (int how = 0; how < 3; ++how) {
    expect_error(kArgument, "moved or replaced", [&] {
      if (how == 0) running_.runner.replay();
      if (how == 1) running_.runner.eager();
      if (how == 2) running_.runner.run(5);
    });
  }
  {
    StaticKvCache another(own_model::cache_options(300, 3));
    running_.cache = std::move(another);
  }
  expect_error(kArgument, "moved or replaced", [&] { running_.runner.replay(); });
  running_.cache = std::move(elsewhere);  // back at the addresses that were captured
  EXPECT_EQ(running_.replayed(), want_);
}

TEST(OwnModelForks, AStreamThatIsJoinedIsCaptured) {
  Running s;
  const std::vector<Tokens> want = s.replayed();
  const Stream other;
  const Event forked;
  const Event joined;
  std::int32_t* word = nullptr;
  cuda::check(cudaMalloc(&word, sizeof(*word)), "memory");
  s.runner.capture([&](CudaStream stream, LoopWords* loop) {
    own_model::check(cudaEventRecord(forked.get, stream));
    own_model::check(cudaStreamWaitEvent(other.get, forked.get, 0));
    set_word<<<1, 1, 0, other.get>>>(word, 42);
    own_model::check(cudaEventRecord(joined.get, other.get));
    s.model.forward(stream, loop);
    own_model::check(cudaStreamWaitEvent(stream, joined.get, 0));
  });
  EXPECT_EQ(s.replayed(), want);
  s.start();
  s.runner.run(1000);
  EXPECT_EQ(s.texts(), want);
  std::int32_t value = 0;
  cuda::check(cudaMemcpy(&value, word, sizeof(value), cudaMemcpyDeviceToHost), "read");
  EXPECT_EQ(value, 42);
  cudaFree(word);
}

TEST(OwnModelLimits, AFullSlotIsRefusedBeforeLaunch) {
  Running s(64, 2);
  s.model.start(0, {5, 6}, 1000);
  s.model.start(1, {7}, 10);
  const LoopResult result = s.runner.run(1000);
  EXPECT_EQ(result.end, LoopEnd::kFull);
  EXPECT_EQ(result.rounds, 64);
  EXPECT_EQ(s.cache.length(0), 64);
  const Tokens text = s.model.text(0);
  EXPECT_EQ(text.size(), 65U);
  for (int how = 0; how < 3; ++how) {
    expect_error(ErrorCode::kContextOverflow, "slot 0 holds 64 of 64 tokens; 1 more", [&] {
      if (how == 0) s.runner.replay();
      if (how == 1) s.runner.eager();
      if (how == 2) s.runner.run(5);
    });
    EXPECT_EQ(s.model.text(0), text);
    EXPECT_EQ(s.cache.length(0), 64);
  }
  // The same a round at a time.
  s.model.start(0, {5, 6}, 1000);
  for (int i = 0; i < 64; ++i) EXPECT_TRUE(s.runner.replay()) << i;
  EXPECT_EQ(s.model.text(0), text);
  expect_error(ErrorCode::kContextOverflow, "slot 0", [&] { s.runner.replay(); });
  // Rounds that leave the full slot alone go on.
  s.model.set_known(0, 0);
  s.model.start(1, {7}, 10);
  s.runner.set_slots({1});
  EXPECT_EQ(s.runner.run(1000).end, LoopEnd::kDone);
  EXPECT_EQ(s.model.text(1).size(), 10U);
  EXPECT_EQ(s.cache.length(0), 64);
  expect_error(kArgument, "slot 2", [&] { s.runner.set_slots({2}); });
  expect_error(kArgument, "twice", [&] { s.runner.set_slots({1, 1}); });
}

TEST(OwnModelLimits, ALoopEndsWhenAsked) {
  StaticKvCache cache(own_model::cache_options(64, 1));
  auto owned = std::make_unique<GraphRunner>(cache, GraphRunnerOptions{.appends = 0});
  GraphRunner& runner = *owned;
  std::int32_t* rounds = nullptr;
  cuda::check(cudaMalloc(&rounds, sizeof(*rounds)), "memory");
  cuda::check(cudaMemset(rounds, 0, sizeof(*rounds)), "memory");
  runner.capture(
      [&](CudaStream stream, LoopWords* loop) { count_round<<<1, 1, 0, stream>>>(rounds, loop); });
  EXPECT_EQ(runner.nodes(), 2U);
  int total = 0;
  for (int i = 0; i < 20; ++i) {
    runner.begin(1 << 30);
    if (i > 0) {  // not once: stop() right behind begin()
      EXPECT_FALSE(runner.poll().has_value());
      expect_error(kArgument, "a loop is running", [&] { runner.replay(); });
      expect_error(kArgument, "a loop is running", [&] { runner.begin(3); });
    }
    runner.stop();
    const LoopResult result = runner.wait();
    EXPECT_EQ(result.end, LoopEnd::kStopped);
    EXPECT_GE(result.rounds, 1);
    total += result.rounds;
  }
  EXPECT_EQ(runner.run(1000).end, LoopEnd::kBound);
  EXPECT_TRUE(runner.replay());
  std::int32_t counted = 0;
  cuda::check(cudaMemcpy(&counted, rounds, sizeof(counted), cudaMemcpyDeviceToHost), "read");
  EXPECT_EQ(counted, total + 1001);
  expect_error(kArgument, "no loop is running", [&] { runner.wait(); });
  expect_error(kArgument, "0 rounds", [&] { runner.run(0); });
  runner.begin(1 << 30);
  owned.reset();  // a runner that goes ends its loop
  cudaFree(rounds);
}

TEST(OwnModelMemory, BytesAreThoseAnnouncedAndRoundsTakeNone) {
  Running s;  // what a process takes once
  s.replayed();
  s.start();
  s.runner.run(1000);
  const auto available = [] {
    std::size_t free = 0;
    std::size_t total = 0;
    cuda::check(cudaMemGetInfo(&free, &total), "free memory");
    return static_cast<std::int64_t>(free);
  };
  constexpr std::int64_t kSlack = 32 << 20;  // whole pages, streams
  const KvCacheOptions options = own_model::cache_options(1 << 16, 32);
  const std::size_t announced = StaticKvCache::plan(options).total;
  ASSERT_GT(announced, std::size_t{256} << 20);
  const std::int64_t before = available();
  {
    const StaticKvCache cache(options);
    EXPECT_EQ(cache.bytes().total, announced);
    EXPECT_EQ(cache.memory().size(), announced);
    const std::int64_t taken = before - available();
    EXPECT_GE(taken, static_cast<std::int64_t>(announced));
    EXPECT_LE(taken, static_cast<std::int64_t>(announced) + kSlack);
  }
  EXPECT_LE(before - available(), kSlack);

  const std::int64_t settled = available();
  const std::uint64_t certificate = s.cache.address_certificate();
  for (int i = 0; i < 20; ++i) s.replayed();
  s.start();
  s.runner.run(1000);
  EXPECT_EQ(available(), settled);
  EXPECT_EQ(s.cache.address_certificate(), certificate);

  KvCacheOptions huge = own_model::cache_options(1 << 24, 512);
  expect_error(ErrorCode::kOutOfMemory, std::to_string(StaticKvCache::plan(huge).total),
               [&] { StaticKvCache cache(huge); });
}

}  // namespace
}  // namespace pianola
