// What a CPU can do at most: bytes read from memory, and multiply-adds of bfloat16 pairs between registers.
#include <immintrin.h>

#include <cstdint>

extern "C" float read_all(const char* memory, int64_t size) {
    float sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t page = 0; page < size / 4096; page++) {
        __m512 found = _mm512_setzero_ps();
        for (int64_t i = 0; i < 4096; i += 64) found = _mm512_add_ps(found, _mm512_loadu_ps(memory + page * 4096 + i));
        sum += _mm512_reduce_add_ps(found);
    }
    return sum;
}

// `count` times 24 independent ones a thread, as many as hide the latency; returns the number of threads.
extern "C" int64_t multiply_pairs(int64_t count) {
    int64_t threads = 0;
#pragma omp parallel reduction(+ : threads)
    {
        threads = 1;
#define TWO(a, b) "vdpbf16ps %%zmm31, %%zmm30, %%zmm" #a "\n vdpbf16ps %%zmm31, %%zmm30, %%zmm" #b "\n"
        for (int64_t i = 0; i < count; i++)
            asm volatile(TWO(0, 1) TWO(2, 3) TWO(4, 5) TWO(6, 7) TWO(8, 9) TWO(10, 11) TWO(12, 13) TWO(14, 15)
                             TWO(16, 17) TWO(18, 19) TWO(20, 21) TWO(22, 23)
                         :
                         :
                         : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10",
                           "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20",
                           "zmm21", "zmm22", "zmm23", "zmm30", "zmm31");
    }
    return threads;
}
