// What a captured graph would do, read back node by node, and a comparison of graphs that were
// captured from the same kernels while the state of the engine differed. Whatever depends on that
// state is frozen into the graph and wrong in the next step.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "backends/cuda/cuda_error.h"
#include "base/check.h"

namespace pianola::cuda {

struct GraphParameter {
  std::size_t offset = 0;  // in the kernel's parameter memory
  std::vector<unsigned char> bytes;
};

struct GraphNode {
  int type = 0;
  std::string name;                // of the kernel
  const void* function = nullptr;  // CUfunction or CUkernel
  // Grid, block, dynamic shared memory; cluster, cooperative, priority.
  std::array<unsigned, 12> launch = {};
  std::vector<GraphParameter> parameters;
};

struct GraphEdge {
  std::size_t from = 0;
  std::size_t to = 0;
  int from_port = 0;
  int to_port = 0;
  int type = 0;
  auto operator<=>(const GraphEdge&) const = default;
};

struct GraphImage {
  std::vector<GraphNode> nodes;  // in the order in which they run
  std::vector<GraphEdge> edges;  // sorted
};

// The driver's functions for graphs.
class GraphDriver {
 public:
  static const GraphDriver& get() {
    static const GraphDriver functions;
    return functions;
  }

  decltype(&cuGraphKernelNodeGetParams) kernel_params = nullptr;
  decltype(&cuGraphKernelNodeGetAttribute) kernel_attribute = nullptr;
  decltype(&cuGraphMemsetNodeGetParams) memset_params = nullptr;
  decltype(&cuFuncGetParamInfo) func_param_info = nullptr;
  decltype(&cuKernelGetParamInfo) kernel_param_info = nullptr;
  decltype(&cuFuncGetName) func_name = nullptr;
  decltype(&cuKernelGetName) kernel_name = nullptr;

 private:
  GraphDriver() {
    find("cuGraphKernelNodeGetParams", kernel_params);
    find("cuGraphKernelNodeGetAttribute", kernel_attribute);
    find("cuGraphMemsetNodeGetParams", memset_params);
    find("cuFuncGetParamInfo", func_param_info);
    find("cuKernelGetParamInfo", kernel_param_info);
    find("cuFuncGetName", func_name);
    find("cuKernelGetName", kernel_name);
  }
  template <typename F>
  static void find(const char* name, F& function) {
    function = reinterpret_cast<F>(driver_function(name, 12040));
  }
};

inline void check_driver(CUresult status, const char* what) {
  if (status != CUDA_SUCCESS) {
    fail(ErrorCode::kDevice, "{}: driver error {}", what, static_cast<int>(status));
  }
}

// Every parameter of a kernel node; sizes are the driver's.
inline std::vector<GraphParameter> read_parameters(const CUDA_KERNEL_NODE_PARAMS& node) {
  const GraphDriver& f = GraphDriver::get();
  const unsigned char* buffer = nullptr;  // all of them, of a kernel that was launched that way
  for (void** extra = node.extra; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      buffer = static_cast<const unsigned char*>(extra[1]);
    }
  }
  std::vector<GraphParameter> parameters;
  for (std::size_t i = 0;; ++i) {
    std::size_t offset = 0;
    std::size_t size = 0;
    const CUresult status = node.func ? f.func_param_info(node.func, i, &offset, &size)
                                      : f.kernel_param_info(node.kern, i, &offset, &size);
    if (status == CUDA_ERROR_INVALID_VALUE) return parameters;  // there is no such parameter
    check_driver(status, "size of a kernel's parameter");
    const auto* value = node.kernelParams ? static_cast<const unsigned char*>(node.kernelParams[i])
                                          : buffer + offset;
    if (!node.kernelParams && !buffer) fail(ErrorCode::kInternal, "a kernel node without values");
    parameters.push_back({offset, {value, value + size}});
  }
}

inline GraphNode read_kernel(cudaGraphNode_t node) {
  const GraphDriver& f = GraphDriver::get();
  CUDA_KERNEL_NODE_PARAMS p = {};
  check_driver(f.kernel_params(node, &p), "parameters of a kernel node");
  GraphNode image;
  const char* name = nullptr;
  if (p.func) {
    image.function = p.func;
    check_driver(f.func_name(&name, p.func), "name of a kernel");
  } else {
    image.function = p.kern;
    check_driver(f.kernel_name(&name, p.kern), "name of a kernel");
  }
  image.name = name;
  CUlaunchAttributeValue cluster = {};
  CUlaunchAttributeValue cooperative = {};
  CUlaunchAttributeValue priority = {};
  check_driver(f.kernel_attribute(node, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &cluster),
               "cluster");
  check_driver(f.kernel_attribute(node, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &cooperative),
               "cooperative launch");
  check_driver(f.kernel_attribute(node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &priority), "priority");
  image.launch = {p.gridDimX,
                  p.gridDimY,
                  p.gridDimZ,
                  p.blockDimX,
                  p.blockDimY,
                  p.blockDimZ,
                  p.sharedMemBytes,
                  cluster.clusterDim.x,
                  cluster.clusterDim.y,
                  cluster.clusterDim.z,
                  static_cast<unsigned>(cooperative.cooperative),
                  static_cast<unsigned>(priority.priority)};
  image.parameters = read_parameters(p);
  return image;
}

inline GraphNode read_memset(cudaGraphNode_t node) {
  CUDA_MEMSET_NODE_PARAMS p = {};
  check_driver(GraphDriver::get().memset_params(node, &p), "parameters of a memset node");
  GraphNode image;
  image.name = "memset";
  const std::array<std::uint64_t, 6> values = {p.dst,         p.pitch, p.value,
                                               p.elementSize, p.width, p.height};
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  image.parameters.push_back({0, {bytes, bytes + sizeof(values)}});
  return image;
}

inline GraphNode read_node(cudaGraphNode_t node) {
  cudaGraphNodeType type = {};
  check(cudaGraphNodeGetType(node, &type), "type of a node");
  GraphNode image;
  if (type == cudaGraphNodeTypeKernel) {
    image = read_kernel(node);
  } else if (type == cudaGraphNodeTypeMemset) {
    image = read_memset(node);
  } else if (type != cudaGraphNodeTypeEmpty) {
    fail(ErrorCode::kInternal, "a node of type {}, of which the audit knows nothing",
         static_cast<int>(type));
  }
  image.type = static_cast<int>(type);
  return image;
}

inline cudaError_t graph_edges(cudaGraph_t graph, cudaGraphNode_t* from, cudaGraphNode_t* to,
                               cudaGraphEdgeData* data, std::size_t* count) {
#if CUDART_VERSION >= 13000
  return cudaGraphGetEdges(graph, from, to, data, count);
#else
  return cudaGraphGetEdges_v2(graph, from, to, data, count);
#endif
}

inline GraphImage read_graph(cudaGraph_t graph) {
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "nodes of a graph");
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) check(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes of a graph");
  std::size_t edge_count = 0;
  check(graph_edges(graph, nullptr, nullptr, nullptr, &edge_count), "edges of a graph");
  std::vector<cudaGraphNode_t> from(edge_count);
  std::vector<cudaGraphNode_t> to(edge_count);
  std::vector<cudaGraphEdgeData> data(edge_count);
  if (edge_count > 0) {
    check(graph_edges(graph, from.data(), to.data(), data.data(), &edge_count), "edges of a graph");
  }

  // The order in which they run, which the order of the list need not be.
  std::map<cudaGraphNode_t, std::size_t> waits;
  for (const cudaGraphNode_t node : to) ++waits[node];
  std::map<cudaGraphNode_t, std::size_t> place;
  GraphImage image;
  while (image.nodes.size() < count) {
    const auto ready = std::find_if(nodes.begin(), nodes.end(), [&](cudaGraphNode_t node) {
      return !place.contains(node) && waits[node] == 0;
    });
    if (ready == nodes.end()) fail(ErrorCode::kInternal, "a graph with a circle");
    place[*ready] = image.nodes.size();
    image.nodes.push_back(read_node(*ready));
    for (std::size_t i = 0; i < edge_count; ++i) {
      if (from[i] == *ready) --waits[to[i]];
    }
  }
  for (std::size_t i = 0; i < edge_count; ++i) {
    image.edges.push_back(
        {place[from[i]], place[to[i]], data[i].from_port, data[i].to_port, data[i].type});
  }
  std::sort(image.edges.begin(), image.edges.end());
  return image;
}

// Everything but the values of parameters: "" when two graphs have it in common.
inline std::string structure_difference(const GraphImage& a, const GraphImage& b) {
  if (a.nodes.size() != b.nodes.size()) {
    return fmt::format("{} nodes and {}", a.nodes.size(), b.nodes.size());
  }
  for (std::size_t i = 0; i < a.nodes.size(); ++i) {
    const GraphNode& x = a.nodes[i];
    const GraphNode& y = b.nodes[i];
    if (x.type != y.type || x.function != y.function) {
      return fmt::format("node {}: {} and {}", i, x.name, y.name);
    }
    for (std::size_t j = 0; j < x.launch.size(); ++j) {
      if (x.launch[j] != y.launch[j]) {
        return fmt::format("node {} ({}): launch value {}: {} and {}", i, x.name, j, x.launch[j],
                           y.launch[j]);
      }
    }
    bool same = x.parameters.size() == y.parameters.size();
    for (std::size_t j = 0; same && j < x.parameters.size(); ++j) {
      same = x.parameters[j].offset == y.parameters[j].offset &&
             x.parameters[j].bytes.size() == y.parameters[j].bytes.size();
    }
    if (!same) return fmt::format("node {} ({}): other parameters", i, x.name);
  }
  return a.edges == b.edges ? "" : "other edges";
}

// A parameter that is declared to differ from graph to graph: `size` bytes at `offset` of parameter
// `index` of kernels whose name contains `kernel`.
struct DeclaredDifference {
  std::string kernel;
  std::size_t index = 0;
  std::size_t offset = 0;
  std::size_t size = 0;
};

// by_state[s] holds several graphs captured in state s, all of one structure. A byte of a parameter
// that is the same in all graphs of each state, and not the same in all states, was read from the
// state: it is frozen. A byte that varies within one state is not a matter of the state: it must be
// declared, or be padding between members, whose value the compiler leaves open. Padding never
// begins at a multiple of eight bytes, as the members of our arguments are not aligned to more, so
// a pointer or a number of 64 bits that varies is found; so is one of 32 bits at such an offset.
// Kernels of libraries may have bytes that nobody sets anywhere.
inline std::vector<std::string> frozen_values(std::span<const std::vector<GraphImage>> by_state,
                                              std::span<const DeclaredDifference> declared) {
  std::vector<std::string> found;
  const GraphImage& first = by_state[0][0];
  for (std::size_t n = 0; n < first.nodes.size(); ++n) {
    const GraphNode& node = first.nodes[n];
    for (std::size_t p = 0; p < node.parameters.size(); ++p) {
      for (std::size_t b = 0; b < node.parameters[p].bytes.size(); ++b) {
        const bool is_declared = std::any_of(declared.begin(), declared.end(), [&](const auto& d) {
          return node.name.find(d.kernel) != std::string::npos && p == d.index && b >= d.offset &&
                 b < d.offset + d.size;
        });
        if (is_declared) continue;
        const auto byte = [&](const GraphImage& image) {
          return image.nodes[n].parameters[p].bytes[b];
        };
        bool varies = false;  // within a state
        bool differs = false;
        for (const std::vector<GraphImage>& images : by_state) {
          for (const GraphImage& image : images) varies |= byte(image) != byte(images[0]);
          differs |= byte(images[0]) != byte(first);
        }
        if (!varies && differs) {
          found.push_back(fmt::format("node {} ({}): parameter {}: byte {} depends on the state", n,
                                      node.name, p, b));
        } else if (varies && b % 8 == 0 && node.name.find("pianola") != std::string::npos) {
          found.push_back(
              fmt::format("node {} ({}): parameter {}: byte {} varies from capture to capture", n,
                          node.name, p, b));
        }
      }
    }
  }
  return found;
}

}  // namespace pianola::cuda
