/* MXFP4 <-> bf16 on one core. cpu.py computes the tables, so that the arithmetic exists only once.
 *
 * A block is 32 values: 16 bytes of two e2m1 codes each (value 2j in the low nibble of byte j,
 * value 2j + 1 in the high nibble) and one scale byte. Numbers are bf16 bits. No operation
 * multiplies: dequantization looks bytes up in a table, and quantization compares magnitudes with
 * limits. */
#include <stddef.h>
#include <stdint.h>

enum {
    VALUES = 32,               /* per block */
    BYTES = 16,                /* per block */
    MAGNITUDE = 0x7fff,        /* a bf16 number without its sign */
    BF16_INFINITY = 0x7f80,    /* larger or equal magnitudes are Inf or NaN */
    MANTISSA = 0x7f,
    MANTISSA_OF_1_5 = 0x40,
    CODE_SIGN = 8,
};

/* pairs[scale][byte]: the two bf16 values of a byte. The low nibble's value is in the low half. */
void mxfp4_dequantize(const uint8_t *restrict blocks, const uint8_t *restrict scales,
                      const uint32_t *restrict pairs, uint32_t *restrict out, size_t count) {
    for (size_t n = 0; n < count; n++) {
        const uint32_t *table = pairs + (size_t)scales[n] * 256;
        for (int j = 0; j < BYTES; j++) out[n * BYTES + j] = table[blocks[n * BYTES + j]];
    }
}

/* The code of a magnitude is the number of limits that it reaches. bf16 magnitudes have the same
 * order as their bits. */
static inline void encode(const uint16_t *restrict x, const uint16_t *restrict limits,
                          uint16_t *restrict code) {
    for (int i = 0; i < VALUES; i++) {
        uint16_t magnitude = x[i] & MAGNITUDE;
        uint16_t reached = 0;
        for (int j = 0; j < 7; j++) reached += magnitude >= limits[j];
        code[i] = reached | ((x[i] >> 12) & CODE_SIGN);
    }
}

/* Return the scale 2^ceil(log2(amax / 6)) of a block as a biased exponent.
 *
 * amax = 1.m * 2^(e - 127) and 6 = 1.5 * 2^2, so the exponent is e - 127 - 2, plus 1 if 1.m > 1.5.
 * The minimum is the exponent of the smallest normal number. A block of zeros gets scale 0. */
static inline int scale_of(uint16_t amax) {
    if (!amax) return 0;
    int scale = (amax >> 7) - 2 + ((amax & MANTISSA) > MANTISSA_OF_1_5);
    return scale < 1 ? 1 : scale;
}

/* limits[scale][8] (the last one unused) and values[scale][16] are bf16 bits. hint may be NULL.
 * Returns the first block with NaN or Inf, or -1. */
ptrdiff_t mxfp4_quantize(const uint16_t *restrict x, const uint8_t *restrict hint,
                         const uint16_t *restrict limits, const uint16_t *restrict values,
                         uint8_t *restrict blocks, uint8_t *restrict scales, size_t count) {
    for (size_t n = 0; n < count; n++, x += VALUES, blocks += BYTES) {
        uint16_t amax = 0;
        for (int i = 0; i < VALUES; i++) {
            uint16_t magnitude = x[i] & MAGNITUDE;
            amax = magnitude > amax ? magnitude : amax;
        }
        if (amax >= BF16_INFINITY) return (ptrdiff_t)n;

        /* Use the hint if it restores every bit of the block. */
        uint16_t code[VALUES];
        int kept = 0;
        if (hint) {
            const uint16_t *value = values + (size_t)hint[n] * 16;
            encode(x, limits + (size_t)hint[n] * 8, code);
            unsigned wrong = 0;
            for (int i = 0; i < VALUES; i++) wrong |= value[code[i]] ^ x[i];
            kept = !wrong;
            scales[n] = hint[n];
        }

        if (!kept) {
            int scale = scale_of(amax);
            scales[n] = (uint8_t)scale;
            encode(x, limits + (size_t)scale * 8, code);
        }

        for (int j = 0; j < BYTES; j++) blocks[j] = (uint8_t)(code[2 * j] | code[2 * j + 1] << 4);
    }
    return -1;
}
