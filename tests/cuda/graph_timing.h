// How long kernels take, replayed as one graph.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "cuda/cuda_fixture.h"

namespace pianola::cuda {

// Microseconds of each of `count` parts that are issued one after the other, the median of 30
// replays. Parts with data of their own keep the second-level cache from holding all.
inline double microseconds(int count, const std::function<void(const Launch&, int part)>& issue) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream), "stream");
  const Launch launch{
      .stream = stream, .sms = multiprocessors(), .dependent = true, .dependent_inside = true};
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < count; ++i) issue(launch, i);
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 30; ++i) {
    check(cudaEventRecord(begin, stream), "event");
    check(cudaGraphLaunch(executable, stream), "launch");
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "kernels");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    times.push_back(ms * 1e3F / static_cast<float>(count));
  }
  std::sort(times.begin(), times.end());
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return times[times.size() / 2];
}

}  // namespace pianola::cuda
