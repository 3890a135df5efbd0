// The kernel behind persistent.h.
//
// One walk over the ops, by all thread blocks together. A product: the activations of this block's
// slice of the columns come from device memory and are split into operand words (stage); every warp
// multiplies them with the tiles that it has in its ring (multiply); the sums of a tile go to the
// block of the cluster that adds its slices and writes the result (finish). Attention: the teams of
// attention_items.cuh. Between two ops all blocks meet (arrive, wait_for_op).
//
// The ring of a warp runs ahead of that walk, across ops: whatever the block waits for, the next
// weights are on their way. Each lane reads only the bytes that it copied itself.
#pragma once

#include "backends/cuda/kernels/attention_tensor.cuh"
#include "backends/cuda/kernels/persistent_stream.cuh"

namespace pianola::cuda::persistent {

template <bool kQuantised, typename T, int kHeadDim, int kGroups, int kDepth>
struct Block {
  const Program& p;
  unsigned char* shared;
  Stream<kQuantised, kDepth> stream;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = static_cast<int>(blockIdx.x) % kBlocks;  // in its cluster
  const int cluster = static_cast<int>(blockIdx.x) / kBlocks;
  const int clusters = static_cast<int>(gridDim.x) / kBlocks;
  unsigned team_parity = 0;

  __device__ __forceinline__ Block(const Program& program, unsigned char* memory)
      : p(program), shared(memory) {}

  __device__ __forceinline__ std::uint32_t full(unsigned buffer) const {
    return shared_address(shared + p.barriers_at) + 8 * buffer;
  }
  __device__ __forceinline__ std::uint32_t empty(unsigned buffer) const {
    return shared_address(shared + p.barriers_at) + 16 + 8 * buffer;
  }
  __device__ __forceinline__ std::uint64_t* team_barrier(int team) const {
    return reinterpret_cast<std::uint64_t*>(shared + p.barriers_at + 32) + team;
  }
  __device__ __forceinline__ float* partials(unsigned buffer) const {
    return reinterpret_cast<float*>(shared + p.partials_at) + buffer * p.partial_floats;
  }
  __device__ __forceinline__ float* squares(int op) const {
    return reinterpret_cast<float*>(shared + p.squares_at) + (op & 1) * kBlocks * p.tokens;
  }
  __device__ __forceinline__ uint4* staged() const {
    return reinterpret_cast<uint4*>(shared + p.staged_at);
  }

  // Tables come to shared memory, and the first weights are asked for.
  __device__ __forceinline__ void begin() {
    const int tid = static_cast<int>(threadIdx.x);
    copy_table(p.entries, p.entries_at, p.ops * static_cast<int>(sizeof(Entry)));
    copy_table(p.shapes, p.shapes_at, p.shape_count * static_cast<int>(sizeof(Shape)));
    if (tid == 0) {
      for (int i = 0; i < 2; ++i) {
        init_barrier(full(i), 1);
        init_barrier(empty(i), kBlocks);
        init_barrier(shared_address(team_barrier(i)), 1);
      }
      fence_barriers();
    }
    __syncthreads();
    const auto* shapes = reinterpret_cast<const Shape*>(shared + p.shapes_at);
    if (tid < p.shape_count) {
      const Shape& s = shapes[tid];
      const unsigned teams = kBlocks / s.slices;
      const unsigned worker = cluster * teams + rank / s.slices;
      const unsigned workers = clusters * teams;
      Range r;
      r.unit_begin = static_cast<int>(static_cast<unsigned>(s.units) * worker / workers);
      r.unit_end = static_cast<int>(static_cast<unsigned>(s.units) * (worker + 1) / workers);
      const int units = s.gated ? 1 : s.tiles;  // of a group
      r.groups = (r.unit_end - r.unit_begin + units - 1) / units;
      r.step_begin = products::slice_begin(s.steps, s.slices, rank % s.slices);
      r.steps = products::slice_begin(s.steps, s.slices, rank % s.slices + 1) - r.step_begin;
      reinterpret_cast<Range*>(shared + p.ranges_at)[tid] = r;
    }
    cluster_arrive();
    __syncthreads();
    stream.begin(p, shared);
    cluster_wait();
  }

  __device__ __forceinline__ void copy_table(const void* from, int to, int bytes) const {
    const auto* source = static_cast<const uint4*>(from);
    auto* target = reinterpret_cast<uint4*>(shared + to);
    for (int i = static_cast<int>(threadIdx.x); i < bytes / 16; i += kThreads) {
      target[i] = __ldg(source + i);
    }
  }

  // All of this block's results of an op are there.
  __device__ __forceinline__ void arrive(int op) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) {
      // Counters that no block looks at any more; the last two are cleared by the next step.
      if (op >= 2) p.arrived[op - 2] = 0;
      if (op == 1) p.arrived[p.ops - 2] = p.arrived[p.ops - 3] = 0;
    }
    // Releases what the other threads wrote too: the barrier above ordered it before this.
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.arrived + op) : "memory");
  }
  // By whole warps.
  __device__ __forceinline__ void wait_for_op(int op) const {
    if (op < 0) return;
    if (lane == 0) {
      Patience patience;
      while (true) {
        std::uint32_t count = 0;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(count)
                     : "l"(p.arrived + op)
                     : "memory");
        if (count >= gridDim.x || patience.over()) break;
        patience.look("op", op);
      }
    }
    __syncwarp();
  }

  // --- Products. ---

  template <typename Do>
  __device__ __forceinline__ void for_form(const Shape& s, const Do& run) const {
    if (s.codes == Codes::kBF16) {
      run.template operator()<Codes::kBF16, Scales::kNone>();
    } else if (s.codes == Codes::kF16) {
      run.template operator()<Codes::kF16, Scales::kNone>();
    } else if constexpr (kQuantised) {
      if (s.codes == Codes::kInt4) {
        if (s.scales == Scales::kHalfPair) {
          run.template operator()<Codes::kInt4, Scales::kHalfPair>();
        } else {
          run.template operator()<Codes::kInt4, Scales::kFloatPair>();
        }
      } else if (s.scales == Scales::kHalfPair) {
        run.template operator()<Codes::kInt8, Scales::kHalfPair>();
      } else if (s.scales == Scales::kFloatPair) {
        run.template operator()<Codes::kInt8, Scales::kFloatPair>();
      } else {
        run.template operator()<Codes::kInt8, Scales::kFloat16>();
      }
    }
  }

  __device__ __forceinline__ void product(int op) {
    const Entry& entry = stream.entries[op];
    const Shape& s = stream.shapes[entry.shape];
    const Range& r = stream.ranges[entry.shape];
    const int slice = rank % s.slices;
    const int first_peer = rank - slice;
    const int turns = s.turns;
    unsigned drained = entry.drained;
    const int live = max(0, min(__ldcg(s.count), s.tokens));

    stage(op, entry, s, r, slice, first_peer);
    if (op + 1 < p.ops && stream.entries[op + 1].shape < 0)
      load_layer(-1 - stream.entries[op + 1].shape);
    __syncthreads();
    for (int turn = 0; turn <= turns; ++turn) {
      if (turn < turns) {
        const unsigned buffer = (entry.first_turn + turn) & 1;
        if (turn >= 2) {
          wait_barrier(empty(buffer), drained >> buffer & 1, "an empty buffer of op", op);
          drained ^= 1U << buffer;
        }
        if (threadIdx.x == 0) {
          const int squares_sent = turn == 0 && s.normed ? s.tokens : 0;
          const int floats = owned(s, r, slice, turn) * s.tiles * kTileRows * s.tokens;
          expect_bytes(full(buffer), s.slices * (floats + squares_sent) * 4);
        }
        for_form(s, [&]<Codes codes, Scales scales>() {
          if (s.tiles == 1) {
            multiply<codes, scales, 1>(s, r, slice, first_peer, turn, buffer);
          } else {
            multiply<codes, scales, 2>(s, r, slice, first_peer, turn, buffer);
          }
        });
      }
      if (turn > 0) finish(op, entry, s, r, slice, first_peer, turn - 1, live);
    }
  }

  // Groups of a turn that this block adds up.
  static __device__ __forceinline__ int owned(const Shape& s, const Range& r, int slice, int turn) {
    const int groups = min(s.turn_groups, r.groups - turn * s.turn_groups);
    return max(0, (groups - slice + s.slices - 1) / s.slices);
  }

  __device__ __forceinline__ void stage(int op, const Entry& entry, const Shape& s, const Range& r,
                                        int slice, int first_peer) const {
    const int first = r.step_begin * s.step_cols;
    const int end = first + r.steps * s.step_cols;
    float4 norm[kHeld];
    if (warp < s.tokens) {
      products::load_norm(entry.norm, s.cols, first, end, lane, norm);
      wait_for_op(op - 1);
    }
    for (int token = warp; token < s.tokens; token += kWarps) {
      const int row = s.gather ? min(max(__ldcg(s.gather + token), 0), s.in_rows - 1) : token;
      const float* x = s.in + static_cast<std::int64_t>(row) * s.in_ld;
      float square = 0;
      for_form(s, [&]<Codes codes, Scales scales>() {
        using S = Step<codes>;
        square = warp_sum(products::convert_slice<codes, 2 * kHeld>(
            entry.norm, s.cols, x, first, end, norm, lane, [&](int c, const uint4& words) {
              const int column = c - first;
              const products::Place place = products::place_of<codes>(column % S::kCols);
              const int product = column / S::kCols * S::kProducts + place.product;
              staged()[(product * s.tokens + token) * 4 + place.t] = words;
            }));
      });
      if (s.normed && lane < s.slices) {
        send(
            peer_address(shared_address(squares(op) + slice * s.tokens + token), first_peer + lane),
            square, peer_address(full(entry.first_turn & 1), first_peer + lane));
      }
    }
  }

  template <Codes codes, Scales scales, int kTiles>
  __device__ __forceinline__ void multiply(const Shape& s, const Range& r, int slice,
                                           int first_peer, int turn, unsigned buffer) {
    const int g = lane / 4;
    const int t = lane % 4;
    const int first = turn * s.turn_groups;
    const int last = min(first + s.turn_groups, r.groups);
    const std::uint32_t sums = shared_address(partials(buffer));
    const std::uint32_t barrier = full(buffer);
    for (int group = first + warp; group < last; group += kWarps) {
      float acc[kTiles][kGroups][4];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
#pragma unroll
          for (int k = 0; k < 4; ++k) acc[n][m][k] = 0;
        }
      }
      multiply_group<codes, scales, kTiles>(acc, s.tokens, r.steps, g, t);

      // Sums lie at their owner as [group][slice][tile][token][row].
      const int owner = first_peer + group % s.slices;
      const int place = ((group - first) / s.slices * s.slices + slice) * kTiles;
      const std::uint32_t to = peer_address(sums, owner);
      const std::uint32_t signal = peer_address(barrier, owner);
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        if (8 * m + g >= s.tokens) continue;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int at = ((place + n) * s.tokens + 8 * m + g) * kTileRows + 2 * t;
          send(to + 4 * at, make_float2(acc[n][m][0] + acc[n][m][2], acc[n][m][1] + acc[n][m][3]),
               signal);
        }
      }
    }
  }

  // acc += this slice of a group of tiles, from the ring. Lanes without a token repeat the last
  // one: what they compute is sent nowhere.
  template <Codes codes, Scales scales, int kTiles>
  __device__ __forceinline__ void multiply_group(float (&acc)[kTiles][kGroups][4], int tokens,
                                                 int steps, int g, int t) {
    using S = Step<codes>;
    constexpr int kSteps = kChunk / kTiles;
    const uint4* activation[kGroups];
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      activation[m] = staged() + min(8 * m + g, tokens - 1) * 4 + t;
    }
    const int stride = tokens * 4;  // of a product
    const auto multiply_step = [&](int i) {
      uint4 weights[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        weights[n] = stream.ring[(stream.slot * kChunk + i * kTiles + n) * 32];
      }
      const auto activations = [&](int j, int m) { return activation[m][j * stride]; };
      if constexpr (scales == Scales::kNone) {
#pragma unroll
        for (int j = 0; j < S::kProducts; ++j) {
#pragma unroll
          for (int m = 0; m < kGroups; ++m) {
            if (kGroups > 1 && 8 * m >= tokens) continue;
            const uint4 v = activations(j, m);
            const std::uint32_t a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
              for (int part = 0; part < S::kParts; ++part) {
                std::uint32_t b0 = 0;
                std::uint32_t b1 = 0;
                products::operand<codes>(weights[n], j, part, b0, b1);
                mma_bf16(acc[n][m], a, b0, b1);
              }
            }
          }
        }
      } else {
        ScaleWords<codes, scales> words[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          words[n].set(stream.words[(stream.slot * kChunk + i * kTiles + n) * 32]);
        }
        products::multiply_blocks<codes, scales>(acc, weights, words, kTiles, tokens, t,
                                                 activations);
      }
#pragma unroll
      for (int m = 0; m < kGroups; ++m) activation[m] += S::kProducts * stride;
    };
    for (int step = 0; step < steps; step += kSteps) {
      stream.wait();
      if (step + kSteps <= steps) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) multiply_step(i);
      } else {
#pragma unroll 1
        for (int i = 0; step + i < steps; ++i) multiply_step(i);
      }
      stream.next();
    }
  }

  // Adds the slices of this block's groups of a turn and stores the results.
  __device__ __forceinline__ void finish(int op, const Entry& entry, const Shape& s, const Range& r,
                                         int slice, int first_peer, int turn, int live) const {
    const int tid = static_cast<int>(threadIdx.x);
    const unsigned number = entry.first_turn + turn;
    const unsigned buffer = number & 1;
    const int slices = s.slices;
    const int tiles = s.tiles;
    const int tokens = s.tokens;
    const bool gated = s.gated != 0;
    const int wide = gated ? 1 : tiles;  // results of a group, 1 or 2 tiles
    const int outputs = owned(s, r, slice, turn) * wide * kTileRows * live;

    struct Output {
      int part = -1;
      int column;  // row of the matrix
      int token;
      const float* sums;  // of its first slice
      float bias;
      float residual;
      std::int64_t at;
    };
    // What does not wait for the sums.
    const auto output = [&](int o) {
      Output out;
      if (o >= outputs) return out;
      const int row = o % kTileRows;
      const int rest = o / kTileRows;
      const int which = rest & (wide - 1);
      const int pair = rest >> (wide - 1);
      const int index = live == 1 ? pair : pair / live;
      out.token = pair - index * live;
      const int group = turn * s.turn_groups + index * slices + slice;
      const int unit = r.unit_begin + (gated ? group : group * tiles);
      const Tile tile = products::tile_of(s, unit, r.unit_end, which);
      if (tile.part < 0 || tile.row + row >= s.part[tile.part].rows) return out;
      out.part = tile.part;
      out.column = tile.row + row;
      out.at = static_cast<std::int64_t>(out.token) * s.part[tile.part].ld + out.column;
      out.sums = partials(buffer) +
                 ((index * slices * tiles + which) * tokens + out.token) * kTileRows + row;
      const float* bias = entry.bias[tile.part];
      out.bias = bias ? __ldg(bias + out.column) : 0.0F;
      out.residual = s.residual ? __ldcg(s.residual + out.at) : 0.0F;
      return out;
    };

    Output out = output(tid);
    wait_barrier(full(buffer), number >> 1 & 1, "slices of op", op);
    const int stride = tiles * tokens * kTileRows;  // from slice to slice
    for (int o = tid; o < outputs;) {
      if (out.part >= 0) {
        float scale = 1;
        if (s.normed) {
          const float* square = squares(op) + out.token;
          const float sum = products::add_slices(slices, [&](int i) { return square[i * tokens]; });
          scale = rsqrtf(sum / static_cast<float>(s.cols) + s.eps);
        }
        const auto total = [&](const float* sums) {
          return __fmul_rn(scale,
                           products::add_slices(slices, [&](int i) { return sums[i * stride]; }));
        };
        float y = total(out.sums);
        if (entry.bias[out.part]) y += out.bias;
        if (gated) {
          float up = total(out.sums + tokens * kTileRows);
          if (entry.bias[1]) up += __ldg(entry.bias[1] + out.column);
          y = __fmul_rn(silu(y), up);
        }
        if (s.residual) y += out.residual;
        s.part[out.part].out[out.at] = y;
      }
      o += kThreads;
      out = output(o);
    }
    if (turn + 2 < s.turns) {
      __syncthreads();  // the buffer has been read
      if (tid < slices) {
        arrive_at_peer(peer_address(empty(buffer), first_peer + tid), kBlocks / slices);
      }
    }
  }

  // --- Attention. ---

  // What attend() of a layer will read: by the op before it.
  __device__ __forceinline__ void load_layer(int layer) const {
    static_assert(sizeof(DecodeParams) % 16 == 0);
    copy_table(p.layers + layer, p.layer_at, sizeof(DecodeParams));
  }

  __device__ __forceinline__ void attend(int op) {
    const DecodeParams& d = *reinterpret_cast<const DecodeParams*>(shared + p.layer_at);
    const int half = warp / kItemWarps;  // this thread's team of its block
    ItemMemory<T> memory(d, shared + p.teams_at + half * p.team_bytes);
    memory.barrier = team_barrier(half);
    memory.log_blocks = 3;
    const bool both = d.log_cluster == 4;  // an item has both teams of each block
    memory.team_bytes = both ? p.team_bytes : 0;
    memory.barrier_bytes = both ? sizeof(std::uint64_t) : 0;
    memory.second = both ? half : 0;
    const int items = d.tokens * d.attention.cache.kv_heads * d.parts;
    const int places = both ? clusters : 2 * clusters;  // items at a time
    const int place = both ? cluster : half * clusters + cluster;
    const int team = both ? half * kBlocks + rank : rank;

    for (int first = 0; first < items; first += places) {
      // All teams have started, and have done with what they received in the round before.
      if (first > 0) cluster_arrive();
      const auto wait = [&] {
        if (first > 0) {
          cluster_wait();
        } else {
          if (team_thread() < 32) wait_for_op(op - 1);
          team_sync();
        }
      };
      Tables tables;
      Item item;
      item.position = -2;
      if (first + place < items) item = find_item<true>(d, tables, first + place, team);
      if (item.position < 0 || item.team >= item.active) {
        wait();
        if (item.position == -1 && item.team == 0) clear_item(d, item);
      } else {
        memory.parity = team_parity;
        expect_parts(d, item, memory);
        if (team_thread() == 0) *memory.item = item;
        const Span<true> span(d.attention.cache, item.end);  // check_attention() refuses others
        const Fresh fresh = find_fresh(tables, item, span);
        TensorItem<T, kHeadDim / 32, kHeadDim / 64, true, kHeadDim == 64 ? 2 : 1, true>(
            d, item, fresh, memory, span)
            .run(tables, wait);
        if (memory.item->ranks > 1 && memory.item->team < memory.item->targets) team_parity ^= 1;
      }
      team_sync();
    }
  }
};

template <bool kQuantised, typename T, int kHeadDim, int kGroups, int kDepth>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    persistent_kernel(const __grid_constant__ Program p) {
  extern __shared__ __align__(16) unsigned char shared[];
  Block<kQuantised, T, kHeadDim, kGroups, kDepth> block(p, shared);
  block.begin();
  wait_for_previous();
  for (int op = 0; op < p.ops; ++op) {
    if (op + 1 == p.ops) allow_next();
    const int shape = block.stream.entries[op].shape;
    if (shape < 0) {
      block.attend(op);
    } else {
      block.product(op);
    }
    if (op + 1 < p.ops) block.arrive(op);
  }
  // No block leaves while another may still send to it.
  cluster_arrive();
  cluster_wait();
}

}  // namespace pianola::cuda::persistent
