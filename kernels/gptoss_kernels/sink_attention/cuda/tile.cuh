// Building blocks that every kernel here uses: shared-memory tiles, asynchronous copies, m16n8k16
// products and conversions between their register layouts.
//
// Compiled at run time by NVRTC (window.py) with these macros:
//   HEAD_SIZE  elements of one head's vector; 64
//   GROUP      query heads packed into one tile, all of the same kv head: 1, 2, 4 or 8
//   GROUPS     groups of that size per kv head, so a kv head serves GROUP * GROUPS query heads
//   WINDOW     keys that a query attends to, including itself; 0 for full causal attention
//   CHUNK      positions per block; only for window_forward.cu and window_backward_q.cu
//
// Terms:
//   position   index of a token in the packed [tokens, heads, D] tensors
//   row        one query head at one position. Row r of a tile is position r / GROUP of the tile
//              and head r % GROUP of the group, because all heads of a group share their keys.
//   step       one iteration of the main loop over keys (forward, dQ) or rows (dK, dV)
//   product    one matrix multiplication of the tensor cores
//
// Scores are in units of log2: the softmax is exp2(score * scale * log2(e) - LSE * log2(e)). The
// factors scale and log2(e) are combined, so log2(e) needs no additional multiplication.
#pragma once

typedef unsigned int u32;
typedef unsigned short bf16;  // as bits: arithmetic is done in fp32 or by the tensor cores

constexpr int THREADS = 128;   // threads of every block: four warps, one Hopper warpgroup
constexpr int D = HEAD_SIZE;
constexpr int CHUNKS = D / 8;  // of 16 bytes in a row of a tile: the unit of copies and swizzles
constexpr int KSTEPS = D / 16; // products over the head size take 16 elements at a time
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// -- shared-memory tiles --------------------------------------------------------------------------
//
// A tile has rows of D bf16 elements. Chunk c of row r is stored at chunk c ^ swizzle(r). Without
// the swizzle, chunk c of eight rows of 128 bytes would be in the same four banks. With it, the
// eight addresses that ldmatrix reads at once cover all 32 banks. For D = 64 this is the 128-byte
// swizzle of the hardware (address bits 4-6 xor bits 7-9), which wgmma and TMA also use.
//
// Tiles start at multiples of 1024 bytes, because the hardware swizzle depends on absolute
// addresses.
//
// The address bits of the chunk's number are directly below those of the row. Therefore
//     address(row, c ^ x) == address(row, c) ^ (x << 4),
// and a loop over the head size updates an address by xor with a constant.

constexpr int ROW_BYTES = D * 2;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ int swizzle(int row) {
    return CHUNKS >= 8 ? row & 7 : (row >> 1) & (CHUNKS - 1);
}

// Byte offset of chunk c of a row from the start of its tile.
__device__ __forceinline__ u32 chunk_address(int row, int c) {
    return row * ROW_BYTES + ((c ^ swizzle(row)) << 4);
}

// -- asynchronous copies from global to shared memory (cp.async) ----------------------------------

// Copy 16 bytes. If `inside` is false, write zeros and do not read the source.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from, bool inside) {
    const int bytes_read = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "r"(bytes_read));
}

__device__ __forceinline__ void cp_async_4(u32 to, const void* from, bool inside) {
    const int bytes_read = inside ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"(to), "l"(from), "r"(bytes_read));
}

// Close a group of this thread's copies; groups finish in order.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;");
}

// Wait until at most N groups of this thread are in flight. Copies of other threads need a barrier.
template <int N> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// -- plain loads and stores of shared memory ------------------------------------------------------
//
// They use addresses, because generic C++ pointers into shared memory need more registers.

__device__ __forceinline__ uint4 shared_load16(u32 address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ float4 shared_load4f(u32 address) {
    float4 r;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ float2 shared_load2f(u32 address) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(r.x), "=f"(r.y)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ void shared_zero16(u32 address) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ void shared_store4(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// -- m16n8k16 products ----------------------------------------------------------------------------
//
// Register layouts ("Matrix Fragments for mma.m16n8k16" in the PTX manual). Four neighboring lanes
// are a "quad". g = lane / 4 is the quad, i = lane % 4 the lane in it:
//   accumulator c[4]   c[0], c[1]: row g, columns 2i and 2i + 1. c[2], c[3]: row g + 8
//   left operand a[4]  words of two bf16. a[0]: row g, k 2i and 2i + 1. a[1]: row g + 8.
//                      a[2], a[3]: the same rows, k + 8
//   right operand b[2] b[0]: column g, k 2i and 2i + 1. b[1]: k + 8
//
// A lane therefore holds parts of two rows, g ("upper", h = 0) and g + 8 ("lower", h = 1). Element
// e of an accumulator belongs to row h = e >> 1 and column e & 1. The four lanes of a quad hold a
// row. wgmma's accumulators have the same layout, with 16 rows for each of its four warps.

// Load four 8 x 8 matrices. Lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// Return the address that a lane passes to ldmatrix_x4 to load 16 rows of a tile as a left operand.
// The four matrices are (rows 0-7, chunk 0), (rows 8-15, chunk 0), (rows 0-7, chunk 1) and (rows
// 8-15, chunk 1). This is the address for k step 0. Step s is at address ^ (s << 5).
__device__ __forceinline__ u32 left_operand_address(int lane) {
    return chunk_address(lane & 15, lane >> 4);
}

// Return the address to load 16 rows of a tile as the 16 columns of a right operand. The product
// is then with the transposed tile. r[0] and r[1] are columns 0-7, r[2] and r[3] columns 8-15.
__device__ __forceinline__ u32 right_operand_address(int lane) {
    return chunk_address((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

// Load 16 rows of a tile as a left operand. `address` is that of left_operand_address().
__device__ __forceinline__ void load_left_operand(u32 (&left)[KSTEPS][4], u32 address) {
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) ldmatrix_x4(left[s], address ^ (s << 5));
}

// c += a b
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Return two fp32 numbers as a word of two bf16, rounded to nearest even.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Store columns 8j to 8j + 7 of an accumulator as words of a left operand, as one half of its k
// step j / 2. Both layouts assign elements to the same lanes, so no data moves between lanes.
template <int N>
__device__ __forceinline__ void pack_columns(u32 (&left)[N][4], int j, const float (&c)[4]) {
    left[j / 2][j % 2 * 2] = pack_bf16(c[0], c[1]);
    left[j / 2][j % 2 * 2 + 1] = pack_bf16(c[2], c[3]);
}

// Store the accumulators of a warp (16 rows of D columns) as bf16 in 16 rows of a shared tile. The
// two rows of a lane are multiplied by `upper` and `lower`.
__device__ __forceinline__ void stage_rows(u32 rows, const float (&c)[CHUNKS][4], float upper,
                                           float lower, int lane) {
    const u32 address = rows + chunk_address(lane >> 2, 0) + 4 * (lane & 3);
#pragma unroll
    for (int n = 0; n < CHUNKS; n++) {
        shared_store4(address ^ (n << 4), pack_bf16(c[n][0] * upper, c[n][1] * upper));
        shared_store4((address ^ (n << 4)) + 8 * ROW_BYTES,
                      pack_bf16(c[n][2] * lower, c[n][3] * lower));
    }
}

// -- arithmetic -----------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float log2_approx(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Reductions over a row, which is in the four lanes of a quad. All four lanes get the result.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Transpose a 4 x 4 matrix of words of a quad: word n of lane i becomes word i of lane n. First
// transpose each 2 x 2 block, then exchange the blocks.
__device__ __forceinline__ void transpose_quad(u32 (&w)[4], int lane) {
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        const u32 other = __shfl_xor_sync(0xffffffffu, lane & 1 ? w[n] : w[n + 1], 1);
        if (lane & 1) w[n] = other;
        else w[n + 1] = other;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const u32 other = __shfl_xor_sync(0xffffffffu, lane & 2 ? w[n] : w[n + 2], 2);
        if (lane & 2) w[n] = other;
        else w[n + 2] = other;
    }
}

// A number as a type, which makes it a compile-time constant of a generic lambda.
template <int N> struct Constant { static constexpr int value = N; };
