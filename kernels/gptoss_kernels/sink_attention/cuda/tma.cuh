// Tiles that arrive by TMA (sm_90): one thread asks for a whole tile, the copy engine brings it in
// the swizzle of tile.cuh, and a barrier in shared memory (mbarrier) counts the bytes that have
// come.
//
// A tile that reaches past the end of its sequence brings rows of the next sequence; zeros come
// only past the end of the tensor. The weights of such rows are 0, but 0 * NaN is not 0:
// zero_rows() overwrites them, so that whatever a neighboring sequence holds stays out of the
// sums. (The last tile of dQ in full attention also has later rows of its own sequence: what is not
// finite there reaches the dQ of up to 63 positions before it.)
#pragma once
#include "warpgroup.cuh"

// A CUtensorMap, encoded on the host by nvrtc.tensor_map: address, shape, box and swizzle.
struct __align__(64) TensorMap { u64 opaque[16]; };

constexpr u32 TILE_OF_64_BYTES = 64 * ROW_BYTES;
constexpr u32 PAIR_BYTES = 2 * TILE_OF_64_BYTES;

// Initialize N barriers of 8 bytes, each waiting for one thread's arrival (and the bytes it
// announces). One thread calls this; the others may use the barriers after the next
// __syncthreads().
template <int N> __device__ __forceinline__ void init_barriers(u32 barriers) {
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive at a barrier and announce bytes: its phase ends when that many have been copied.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Wait for the end of a barrier's phase, named by its parity: phases count 0, 1, 2, ... Afterwards
// this thread and the tensor cores see the bytes.
__device__ __forceinline__ void wait_full(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

// Begin to copy the box of a [tokens, heads, D] tensor that starts at (position, head) into a tile.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int head, int position,
                                          u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(map), "r"(0), "r"(head), "r"(position), "r"(barrier)
                 : "memory");
}

// Begin to copy the same box of two tensors (K and V, or Q and dO), one tile behind the other.
__device__ __forceinline__ void copy_pair(u32 to, const TensorMap* first, const TensorMap* second,
                                          int head, int position, u32 barrier) {
    expect_bytes(barrier, PAIR_BYTES);
    copy_tile(to, first, head, position, barrier);
    copy_tile(to + TILE_OF_64_BYTES, second, head, position, barrier);
}

// N stages of shared memory through which pairs of tiles pass in order. All threads call
// everything, and so agree on the counters; thread 0 does the asking.
//
// The ring does not know when a stage has been read. Whoever calls fetch() makes sure, with a
// __syncthreads() after the last product that read it, that the stage is no longer in use.
template <int N> struct Ring {
    u32 stages;
    u32 barriers;        // one per stage
    u32 parity = 0;      // of the phase to wait for; changes when stage 0 is in use again
    int next = 0;        // stage to be filled
    int current = 0;     // stage in use

    __device__ Ring(u32 stages, u32 barriers) : stages(stages), barriers(barriers) {
        if (threadIdx.x == 0) init_barriers<N>(barriers);
    }

    __device__ __forceinline__ void fetch(const TensorMap* first, const TensorMap* second, int head,
                                          int position) {
        const u32 to = stages + next * PAIR_BYTES;
        if (threadIdx.x == 0) copy_pair(to, first, second, head, position, barriers + 8 * next);
        next = next + 1 == N ? 0 : next + 1;
    }

    // The pair in use, once wait() has returned.
    __device__ __forceinline__ u32 tiles() const { return stages + current * PAIR_BYTES; }

    __device__ __forceinline__ void wait() const { wait_full(barriers + 8 * current, parity); }

    __device__ __forceinline__ void advance() {
        current = current + 1 == N ? 0 : current + 1;
        parity ^= current == 0;
    }
};

// Zero the rows from `first` on of a pair of tiles of 64 rows. All threads call it; a barrier must
// follow before the tensor cores read the tiles.
__device__ __forceinline__ void zero_rows(u32 tiles, int first, int thread) {
    constexpr int TILE_CHUNKS = 64 * CHUNKS;
#pragma unroll 1
    for (int i = first * CHUNKS + thread; i < TILE_CHUNKS; i += THREADS) {
        shared_zero16(tiles + i * 16);
        shared_zero16(tiles + (TILE_CHUNKS + i) * 16);
    }
    publish_shared();
}
