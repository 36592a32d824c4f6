// Tiles by TMA (sm_90): one thread asks, a barrier in shared memory counts the bytes that have come.
// A tile that reaches past its sequence brings rows of the next one, zeros only past the tensor. Their weights are 0, but
// 0 * NaN is not: zero_rows() keeps whatever a neighbour holds out of the sums. (dQ's last tile has later rows of its own
// sequence, too: there what is not finite reaches the dQ of up to 63 positions before it.)
#pragma once
#include "warpgroup.cuh"

struct __align__(64) TensorMap { u64 opaque[16]; };            // CUtensorMap, of nvrtc.tensor_map
constexpr u32 PAIR_BYTES = 2 * 64 * ROW_BYTES;

template <int N> __device__ __forceinline__ void start_barriers(u32 barriers) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// A barrier's phases count from 0 and are told by their last bit. Whoever has waited sees the bytes, as do the tensor cores.
__device__ __forceinline__ void wait_full(u32 barrier, u32 phase) {
    u32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
    } while (!done);
}
// A box of `map`'s [tokens, heads, D] from (position, head) on: a tile in the swizzle of tile.cuh.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int head, int position, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(map), "r"(0), "r"(head), "r"(position), "r"(barrier) : "memory");
}
// Two tiles, one behind the other, on their way.
__device__ __forceinline__ void copy_pair(u32 to, const TensorMap* first, const TensorMap* second, int head, int position,
                                          u32 barrier) {
    expect_bytes(barrier, PAIR_BYTES);
    copy_tile(to, first, head, position, barrier);
    copy_tile(to + PAIR_BYTES / 2, second, head, position, barrier);
}
// Pairs of tiles that pass through N stages one after the other. All threads call everything.
template <int N> struct Ring {
    u32 stages, barriers, phase = 0;
    int next = 0, number = 0;                                  // stage to be filled, stage in use
    __device__ Ring(u32 stages, u32 barriers) : stages(stages), barriers(barriers) {
        if (threadIdx.x == 0) start_barriers<N>(barriers);
    }
    __device__ __forceinline__ void fetch(const TensorMap* first, const TensorMap* second, int head, int position) {
        if (threadIdx.x == 0)
            copy_pair(stages + next * PAIR_BYTES, first, second, head, position, barriers + 8 * next);
        next = next + 1 == N ? 0 : next + 1;
    }
    __device__ __forceinline__ u32 tiles() const { return stages + number * PAIR_BYTES; }
    __device__ __forceinline__ void wait() const { wait_full(barriers + 8 * number, phase); }
    __device__ __forceinline__ void advance() {
        number = number + 1 == N ? 0 : number + 1;
        phase ^= number == 0;
    }
};
// Zeros for the rows from `first` on of two tiles of 64 rows, one behind the other; follow with a barrier.
__device__ __forceinline__ void zero_rows(u32 tiles, int first, int thread) {
    constexpr int TILE_CHUNKS = 64 * CHUNKS;
#pragma unroll 1
    for (int i = first * CHUNKS + thread; i < TILE_CHUNKS; i += THREADS) {
        shared_zero16(tiles + i * 16);
        shared_zero16(tiles + (TILE_CHUNKS + i) * 16);
    }
    publish_shared();
}
