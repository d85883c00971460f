// Conversion of stored matrices to the dtype in use, scaled and maybe transposed; their placement in adjacent columns
// of rows.
#include <algorithm>

#include "vector_math.h"

using namespace outrider;

namespace {

struct Matrix {
    const void* values;
    int64_t rows, columns;       // of the stored matrix
    int64_t dtype;
    int64_t transposed;
    double scale;
};

struct Part {                    // of the rows: all counts in bytes
    const char* values;
    int64_t rows, bytes, offset;
};

// Rounds like `store`, and subnormal numbers too, as torch does on every machine.
inline VecU32 rounded(Vec value) {
    const VecU32 bits = (VecU32)value;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

// Writes the lanes up to `count`; a lane of the result is 0 if the number is finite.
inline VecU32 put(float* p, Vec value, int64_t count) {
    store(p, value, count);
    return (VecU32)(((VecU32)value & 0x7f800000u) == 0x7f800000u);
}
inline VecU32 put(bf16* p, Vec value, int64_t count) {
    const VecU32 bits = rounded(value);
    const VecU16 half = __builtin_convertvector(bits >> 16, VecU16);
    std::memcpy(p, &half, (count >= LANES ? LANES : count) * sizeof(bf16));
    return (VecU32)((bits & 0x7f800000u) == 0x7f800000u) | (VecU32)(value != value);  // a rounded NaN may look finite
}

template <typename From, typename To>
VecU32 straight(const From* from, int64_t count, float scale, To* to) {
    VecU32 bad = {};
    for (int64_t i = 0; i < count; i += LANES) bad |= put(to + i, load(from + i, count - i) * scale, count - i);
    return bad;
}

// N vectors hold N * LANES numbers in their order: log2(LANES) zips of all make LANES rows of N to N rows of LANES.
template <int N>
inline void turn(Vec* x) {
    Vec y[N];
    for (int stage = LANES; stage > 1; stage /= 2) {
        for (int k = 0; k < N / 2; k++) {
            y[2 * k] = zip_low(x[k], x[k + N / 2]);
            y[2 * k + 1] = zip_high(x[k], x[k + N / 2]);
        }
        for (int k = 0; k < N; k++) x[k] = y[k];
    }
}

// to[j, i] = from[i, j] * scale, in squares; in blocks of LANES rows when rows are half as long, as for rank 8.
template <typename From, typename To>
VecU32 transposed(const From* from, int64_t rows, int64_t columns, float scale, To* to) {
    constexpr int HALF = LANES / 2;
    VecU32 bad = {};
    Vec x[LANES];
    int64_t i = 0;
    for (; columns == HALF && i + LANES <= rows; i += LANES) {
        for (int k = 0; k < HALF; k++) x[k] = load(from + i * HALF + k * LANES);
        turn<HALF>(x);
        for (int k = 0; k < HALF; k++) bad |= put(to + k * rows + i, x[k] * scale, LANES);
    }
    for (; i < rows; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            const int64_t height = std::min<int64_t>(LANES, rows - i), width = std::min<int64_t>(LANES, columns - j);
            for (int k = 0; k < LANES; k++)
                x[k] = k < height ? load(from + (i + k) * columns + j, width) : zeros();
            turn<LANES>(x);
            for (int64_t k = 0; k < width; k++) bad |= put(to + (j + k) * rows + i, x[k] * scale, height);
        }
    return bad;
}

template <typename From, typename To>
VecU32 convert_one(const Matrix& matrix, To* to) {
    const From* from = (const From*)matrix.values;
    const float scale = float(matrix.scale);
    if (matrix.transposed) return transposed(from, matrix.rows, matrix.columns, scale, to);
    return straight(from, matrix.rows * matrix.columns, scale, to);
}

template <typename To>
bool convert(const Matrix* matrices, int64_t count, To* to) {
    VecU32 bad = {};
    for (const Matrix* matrix = matrices; matrix < matrices + count; to += matrix->rows * matrix->columns, matrix++)
        bad |= matrix->dtype == BFLOAT16 ? convert_one<bf16>(*matrix, to) : convert_one<float>(*matrix, to);
    uint32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= bad[i];
    return !any;
}

}  // namespace

// True when all numbers are finite in `dtype`.
extern "C" int64_t outrider_convert(const Matrix* matrices, int64_t count, void* to, int64_t dtype) {
    return dtype == BFLOAT16 ? convert(matrices, count, (bf16*)to) : convert(matrices, count, (float*)to);
}

// to[row, offset...] = the part's rows; `stride` bytes lie between two rows.
extern "C" void outrider_place(const Part* parts, int64_t count, char* to, int64_t stride) {
    for (const Part* part = parts; part < parts + count; part++)
        for (int64_t row = 0; row < part->rows; row++)
            std::memcpy(to + row * stride + part->offset, part->values + row * part->bytes, part->bytes);
}
