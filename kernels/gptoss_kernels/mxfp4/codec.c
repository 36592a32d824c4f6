/* MXFP4 <-> bf16 on one core. Tables come from the caller, so that the arithmetic is written once, in Python. */
#include <stddef.h>
#include <stdint.h>

/* pairs[scale][byte]: the two bf16 values of a byte, the low nibble's in the low half. */
void mxfp4_dequantize(const uint8_t *restrict blocks, const uint8_t *restrict scales, const uint32_t *restrict pairs,
                      uint32_t *restrict out, size_t count) {
    for (size_t n = 0; n < count; n++) {
        const uint32_t *table = pairs + (size_t)scales[n] * 256;
        for (int j = 0; j < 16; j++) out[n * 16 + j] = table[blocks[n * 16 + j]];
    }
}

/* A magnitude's code is the number of limits it reaches: bf16 magnitudes order like their bits. */
static inline void encode(const uint16_t *restrict x, const uint16_t *restrict limits, uint16_t *restrict code) {
    for (int i = 0; i < 32; i++) {
        uint16_t a = x[i] & 0x7fff;
        uint16_t c = 0;
        for (int j = 0; j < 7; j++) c += a >= limits[j];
        code[i] = c | ((x[i] >> 12) & 8);
    }
}

/* limits[scale][7], values[scale][16]: bf16 bits. hint may be NULL. Returns the first block with NaN or Inf, or -1. */
ptrdiff_t mxfp4_quantize(const uint16_t *restrict x, const uint8_t *restrict hint, const uint16_t *restrict limits,
                         const uint16_t *restrict values, uint8_t *restrict blocks, uint8_t *restrict scales,
                         size_t count) {
    for (size_t n = 0; n < count; n++, x += 32, blocks += 16) {
        uint16_t code[32], amax = 0;
        for (int i = 0; i < 32; i++) {
            uint16_t a = x[i] & 0x7fff;
            amax = a > amax ? a : amax;
        }
        if (amax >= 0x7f80) return (ptrdiff_t)n;
        int kept = 0;
        if (hint) {
            const uint16_t *value = values + (size_t)hint[n] * 16;
            encode(x, limits + (size_t)hint[n] * 8, code);
            unsigned wrong = 0;
            for (int i = 0; i < 32; i++) wrong |= value[code[i]] ^ x[i];
            kept = !wrong;
            scales[n] = hint[n];
        }
        if (!kept) {
            /* amax = 1.m * 2^(e-127); ceil(log2(amax / 6)) = e - 127 - 2 + (1.m > 1.5), never below the least normal */
            int scale = (amax >> 7) - 2 + ((amax & 127) > 64);
            if (scale < 1) scale = 1;
            if (!amax) scale = 0;
            scales[n] = (uint8_t)scale;
            encode(x, limits + (size_t)scale * 8, code);
        }
        for (int j = 0; j < 16; j++) blocks[j] = (uint8_t)(code[2 * j] | code[2 * j + 1] << 4);
    }
    return -1;
}
