// Merges low-rank updates into frozen weights: out = bf16(W + scale * (B A)), W in bf16 or MXFP4.
//
// Ownership       A thread owns 8 columns of ROWS rows of one expert's weight. Threads share no
//                 data, so there is no shared memory and no barrier. Neighboring threads own
//                 neighboring columns, so a warp reads and writes 512 consecutive bytes of a row.
// Grid            One thread for each (expert, ROWS rows, 8 columns). Columns vary fastest.
// Registers       The update of all values of the thread in fp32, and B of its rows for 8 ranks at
//                 a time. A is read once per rank for ROWS rows. B is the same for a whole warp. A
//                 load returns it for 8 ranks.
//
// Rounding        B A is summed in fp32 in the order of the ranks, like layers/merge.py of the
//                 trainer in torch. The product of two bf16 values has 16 bits and is exact in
//                 fp32, so a fused multiply-add rounds only the sum. (Products below 2^-133 are not
//                 exact. They matter only if the weight is 0 and no product is larger.) The last
//                 multiplication and addition are rounded separately. The intrinsics prevent the
//                 compiler from fusing them.
//
// The file is also valid C. Tests compile it for the host, where each thread is a function call
// (tests/support/kernels/cuda_on_host.h), and compare all bits with torch.
//
// Macros: MXFP4 is 1 for a base in MXFP4 and 0 for bf16. ROWS is the number of rows per thread.
#ifndef KERNEL
#define KERNEL extern "C" __global__ void __launch_bounds__(128)
#endif

#define COLUMNS 8  // per thread: 16 bytes of bf16, 4 bytes of codes
#define RANKS 8    // ranks of B in one load of 16 bytes
#define LARGEST_AT_ONCE 128u  // scale of a block that one multiplication applies

// fp32 values of the bf16 halves of a word
static inline float low_half(unsigned word) { return __uint_as_float(word << 16); }
static inline float high_half(unsigned word) { return __uint_as_float(word & 0xFFFF0000u); }

static inline void unpack(uint4 words, float *values) {
    values[0] = low_half(words.x);
    values[1] = high_half(words.x);
    values[2] = low_half(words.y);
    values[3] = high_half(words.y);
    values[4] = low_half(words.z);
    values[5] = high_half(words.z);
    values[6] = low_half(words.w);
    values[7] = high_half(words.w);
}

// Return the i-th of eight bf16 values as fp32. i is a compile-time constant.
static inline float half_of(uint4 words, int i) {
    const unsigned word = i < 2 ? words.x : i < 4 ? words.y : i < 6 ? words.z : words.w;
    return i % 2 == 0 ? low_half(word) : high_half(word);
}

// Round two fp32 values to bf16, ties to even. The first value is in the low half.
static inline unsigned rounded_pair(float low, float high) {
    unsigned pair;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    pair = bf16_bits(low) | bf16_bits(high) << 16;
#endif
    return pair;
}

#if MXFP4
// Convert 8 codes of 4 bits to fp32. The first column is in the lowest bits. `scale` is the scale
// byte of the block, which means 2^(scale - 127).
//
// e2m1 has a sign, two bits of exponent and one bit of mantissa. The three bits of a magnitude
// become fp32's two lowest exponent bits and highest mantissa bit. The result is the value times
// 2^-126, also for the subnormal codes (0 and 0.5). A multiplication by 2^(scale - 1) corrects
// this. If this factor is not finite (weights above 1), there are two multiplications. All
// multiplications change only the exponent, so they are exact.
static inline void decode(unsigned codes, unsigned scale, float *values) {
    const unsigned first_scale = scale < LARGEST_AT_ONCE ? scale : LARGEST_AT_ONCE;
    const float factor = __uint_as_float((first_scale + 126u) << 23);
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        const unsigned code = codes >> 4 * column;
        const unsigned bits = (code & 7u) << 22 | (code & 8u) << 28;
        values[column] = __fmul_rn(__uint_as_float(bits), factor);
    }

    if (scale > LARGEST_AT_ONCE) {
        const float rest = __uint_as_float((scale - LARGEST_AT_ONCE + 127u) << 23);
#pragma unroll
        for (int column = 0; column < COLUMNS; column++)
            values[column] = __fmul_rn(values[column], rest);
    }
}
#endif

// base:         [experts, rows, groups] of 8 columns: words of codes, or four words of bf16.
// scales:       [experts, rows, groups / 4] bytes; not read if the base is bf16.
// a:            [experts, rank, groups] of 8 bf16.
// b:            [experts, rows, rank / 8] of 8 bf16.
// out:          [experts, rows, groups] of 8 bf16.
// rank:         a multiple of 8.
KERNEL merge_adapters(const void *__restrict__ base, const unsigned char *__restrict__ scales,
                      const uint4 *__restrict__ a, const uint4 *__restrict__ b,
                      uint4 *__restrict__ out, float update_scale, int experts, int rows,
                      int groups, int rank) {
    const int tiles = (rows + ROWS - 1) / ROWS;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    const int group = thread % groups;
    const int tile = thread / groups;
    const int expert = tile / tiles;
    const int first_row = tile % tiles * ROWS;
    if (expert >= experts) return;

    // Index of the first row among the rows of all experts, and its offset in base and out.
    const long long first = (long long)expert * rows + first_row;
    const long long place = first * groups + group;
    const int last = rows - 1 - first_row;
    const int chunks = rank / RANKS;

    float update[ROWS][COLUMNS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) update[r][c] = 0;

    for (int chunk = 0; chunk < chunks; chunk++) {
        // A row after the end uses B of the last row, and is not written.
        uint4 b_of_row[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            b_of_row[r] = b[first * chunks + (r < last ? r : last) * chunks + chunk];

        const uint4 *a_of_chunk = a + ((long long)expert * rank + chunk * RANKS) * groups + group;
#pragma unroll
        for (int i = 0; i < RANKS; i++) {
            float a_of_rank[COLUMNS];
            unpack(a_of_chunk[i * groups], a_of_rank);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float b_of_rank = half_of(b_of_row[r], i);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    update[r][c] = __fmaf_rn(b_of_rank, a_of_rank[c], update[r][c]);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r > last) break;

        float value[COLUMNS];
#if MXFP4
        // A block of 32 columns (four groups) has one scale.
        const unsigned codes = ((const unsigned *)base + place)[r * groups];
        decode(codes, (scales + place / 4)[r * (groups / 4)], value);
#else
        unpack(((const uint4 *)base + place)[r * groups], value);
#endif
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            // Adding a zero would turn a negative zero of the base into a positive one.
            const float scaled = __fmul_rn(update[r][c], update_scale);
            value[c] = scaled == 0 ? value[c] : __fadd_rn(value[c], scaled);
        }

        uint4 merged;
        merged.x = rounded_pair(value[0], value[1]);
        merged.y = rounded_pair(value[2], value[3]);
        merged.z = rounded_pair(value[4], value[5]);
        merged.w = rounded_pair(value[6], value[7]);
        (out + place)[r * groups] = merged;
    }
}
