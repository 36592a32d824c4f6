// Copies of tiles by TMA (sm_90). One thread requests a whole tile. The copy engine writes it with
// the swizzle of tile.cuh. A barrier in shared memory (mbarrier) counts the received bytes.
//
// A tile beyond the end of its sequence contains rows of the next sequence. Only rows beyond the
// end of the tensor are 0. The weights of such rows are 0, but 0 * NaN is NaN. Therefore
// zero_rows() overwrites these rows, so that values of another sequence cannot change a sum. (The
// last tile of dQ in full attention also has later rows of the same sequence. A value there that is
// not finite changes dQ of up to 63 positions before it.)
#pragma once
#include "warpgroup.cuh"

// A CUtensorMap, encoded on the host by nvrtc.tensor_map: address, shape, box and swizzle.
struct __align__(64) TensorMap { u64 opaque[16]; };

constexpr u32 TILE_OF_64_BYTES = 64 * ROW_BYTES;
constexpr u32 PAIR_BYTES = 2 * TILE_OF_64_BYTES;

// Initialize N barriers of 8 bytes. Each waits for the arrival of one thread and for the bytes that
// this thread announces. One thread calls this function. Others may use the barriers after the next
// __syncthreads().
template <int N> __device__ __forceinline__ void init_barriers(u32 barriers) {
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive at a barrier and announce bytes. Its phase ends when this number of bytes has been copied.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Wait until the phase of a barrier with this parity has ended. Phases count 0, 1, 2, ...
// Afterwards the bytes are visible to this thread and to the tensor cores.
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

// Start to copy a box of a [tokens, heads, D] tensor to a tile. It starts at (position, head).
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int head, int position,
                                          u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(map), "r"(0), "r"(head), "r"(position), "r"(barrier)
                 : "memory");
}

// Start to copy the same box of two tensors (K and V, or Q and dO) to two consecutive tiles.
__device__ __forceinline__ void copy_pair(u32 to, const TensorMap* first, const TensorMap* second,
                                          int head, int position, u32 barrier) {
    expect_bytes(barrier, PAIR_BYTES);
    copy_tile(to, first, head, position, barrier);
    copy_tile(to + TILE_OF_64_BYTES, second, head, position, barrier);
}

// Ring buffer of N stages in shared memory for pairs of tiles. All threads call every method, so
// their counters are equal. Thread 0 requests the copies.
//
// The ring does not know when a stage has been read. The caller of fetch() must ensure that its
// stage is not in use, with a __syncthreads() after the last product that read it.
template <int N> struct Ring {
    u32 stages;
    u32 barriers;        // one per stage
    u32 parity = 0;      // parity of the phase to wait for; changes at every return to stage 0
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

    // Return the current pair of tiles. It is complete after wait().
    __device__ __forceinline__ u32 tiles() const { return stages + current * PAIR_BYTES; }

    __device__ __forceinline__ void wait() const { wait_full(barriers + 8 * current, parity); }

    __device__ __forceinline__ void advance() {
        current = current + 1 == N ? 0 : current + 1;
        parity ^= current == 0;
    }
};

// Set the rows from `first` on of a pair of tiles of 64 rows to 0. All threads call it. A barrier
// must follow before the tensor cores read the tiles.
__device__ __forceinline__ void zero_rows(u32 tiles, int first, int thread) {
    constexpr int TILE_CHUNKS = 64 * CHUNKS;
#pragma unroll 1
    for (int i = first * CHUNKS + thread; i < TILE_CHUNKS; i += THREADS) {
        shared_zero16(tiles + i * 16);
        shared_zero16(tiles + (TILE_CHUNKS + i) * 16);
    }
    publish_shared();
}
