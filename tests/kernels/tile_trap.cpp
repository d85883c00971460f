// Computes the tile instructions of AMX on a processor that has none: it refuses each (SIGILL), and the handler here does
// the work on registers of its own, with the operations of Intel's Software Developer's Manual. So the kernels are tested
// as they are compiled. It is linked with them, and answers their request for tiles in Linux's place.
//
// OUTRIDER_TILE_FAULT: "crash" leaves the instructions refused, "wrong bytes" and "wrong pairs" add 1 to sums.
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <sys/ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Thread {
    std::atomic<pid_t> id;
    bool is_configured;
    uint16_t bytes[8];
    uint8_t rows[8];
    uint8_t tiles[8][16][64];
};

Thread threads[64];
bool has_wrong_bytes, has_wrong_pairs;

Thread& own() {
    const pid_t id = gettid();
    for (Thread& thread : threads)
        if (thread.id == id) return thread;
    for (Thread& thread : threads) {
        pid_t none = 0;
        if (thread.id.compare_exchange_strong(none, id)) return thread;
    }
    _exit(3);
}

[[noreturn]] void fail(const char* why) {
    std::fprintf(stderr, "tile_trap: %s\n", why);
    std::abort();
}

void check(bool right, const char* why) {
    if (!right) fail(why);
}

float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }

float widen(const uint8_t* half) {
    uint16_t bits;
    std::memcpy(&bits, half, 2);
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return flushed(value);
}

// A fused multiply-add, rounded to nearest even; denormal numbers are zeros.
float fused(float a, float b, float sum) { return flushed(std::fma(a, b, flushed(sum))); }

void multiply(Thread& t, int to, int a, int b, bool is_pairs) {
    const int depth = t.bytes[a] / 4, outputs = t.bytes[to] / 4;
    check(t.bytes[a] % 4 == 0 && t.bytes[to] % 4 == 0, "columns are not of 4 bytes");
    check(t.rows[to] == t.rows[a] && t.bytes[to] == t.bytes[b] && t.rows[b] == depth, "tiles do not fit");
    check(to != a && to != b && a != b, "a tile is used twice");
    for (int m = 0; m < t.rows[to]; m++) {
        float pairs[16][2] = {};
        for (int k = 0; k < depth; k++)
            for (int n = 0; n < outputs; n++) {
                const uint8_t *left = t.tiles[a][m] + 4 * k, *right = t.tiles[b][k] + 4 * n;
                if (is_pairs) {
                    for (int i = 0; i < 2; i++) pairs[n][i] = fused(widen(left + 2 * i), widen(right + 2 * i), pairs[n][i]);
                    continue;
                }
                int32_t sum;
                std::memcpy(&sum, t.tiles[to][m] + 4 * n, 4);
                for (int i = 0; i < 4; i++) sum = int32_t(uint32_t(sum) + uint32_t(int8_t(left[i]) * int32_t(right[i])));
                sum += has_wrong_bytes;
                std::memcpy(t.tiles[to][m] + 4 * n, &sum, 4);
            }
        for (int n = 0; is_pairs && n < outputs; n++) {
            float sum;
            std::memcpy(&sum, t.tiles[to][m] + 4 * n, 4);
            sum = flushed(flushed(sum) + flushed(pairs[n][0] + pairs[n][1])) + has_wrong_pairs;
            std::memcpy(t.tiles[to][m] + 4 * n, &sum, 4);
        }
        std::memset(t.tiles[to][m] + t.bytes[to], 0, 64 - t.bytes[to]);
    }
    for (int m = t.rows[to]; m < 16; m++) std::memset(t.tiles[to][m], 0, 64);
}

void configure(Thread& t, const uint8_t* from) {
    check(from[0] == 1 && from[1] == 0, "another palette, or a start row");
    for (int i = 2; i < 16; i++) check(!from[i], "reserved bytes are not 0");
    for (int i = 0; i < 16; i++) {
        uint16_t bytes;
        std::memcpy(&bytes, from + 16 + 2 * i, 2);
        const uint8_t rows = from[48 + i];
        check(bytes <= 64 && rows <= 16 && !bytes == !rows && (i < 8 || !bytes), "no such tile");
        if (i < 8) t.bytes[i] = bytes, t.rows[i] = rows;
    }
    std::memset(t.tiles, 0, sizeof t.tiles);
    t.is_configured = true;
}

// Registers by their numbers in an instruction.
greg_t* place(mcontext_t& context, int number) {
    static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return &context.gregs[order[number]];
}

void refuse(int, siginfo_t*, void* raw) {
    mcontext_t& context = ((ucontext_t*)raw)->uc_mcontext;
    const uint8_t* code = (const uint8_t*)context.gregs[REG_RIP];
    if (code[0] != 0xc4 || (code[1] & 31) != 2) {  // no VEX prefix of the map 0F38
        signal(SIGILL, SIG_DFL);
        return;
    }
    const bool r = !(code[1] & 128), x = !(code[1] & 64), b = !(code[1] & 32);
    const int third = ~(code[2] >> 3) & 15, prefix = code[2] & 3, op = code[3], modrm = code[4];  // NP, 66, F3, F2
    const int mode = modrm >> 6, reg = (modrm >> 3 & 7) + 8 * r, rm = modrm & 7;
    check(!(code[2] & 0x84), "VEX.W and VEX.L must be 0");
    const uint8_t* next = code + 5;
    Thread& t = own();
    if (mode == 3) {
        check(op == 0x49 || t.is_configured, "tiles are not configured");
        if (op == 0x49 && prefix == 0 && modrm == 0xc0) t.is_configured = false;  // TILERELEASE
        else if (op == 0x49 && prefix == 3 && rm == 0) std::memset(t.tiles[reg], 0, sizeof t.tiles[reg]);  // TILEZERO
        else if (op == 0x5c && prefix == 2) multiply(t, reg, rm, third, true);   // TDPBF16PS
        else if (op == 0x5e && prefix == 2) multiply(t, reg, rm, third, false);  // TDPBSUD
        else fail("an unknown instruction on registers");
        context.gregs[REG_RIP] = (greg_t)next;
        return;
    }
    int base = rm + 8 * b, index = 4;
    int64_t scale = 1;
    if (rm == 4) {
        const uint8_t sib = *next++;
        scale = 1 << (sib >> 6);
        index = (sib >> 3 & 7) + 8 * x;
        base = (sib & 7) + 8 * b;
    }
    int64_t address = 0, step = index == 4 ? 0 : *place(context, index) * scale;
    int32_t wide = 0;
    if (mode == 2 || (mode == 0 && (base & 7) == 5)) std::memcpy(&wide, next, 4), next += 4;
    else if (mode == 1) wide = int8_t(*next++);
    address = wide;
    if (mode == 0 && rm == 5) address += (int64_t)next;  // relative to the instruction pointer
    else if (mode != 0 || (base & 7) != 5) address += *place(context, base);
    if (op == 0x49 && prefix == 0) {
        check((modrm >> 3 & 7) == 0, "an unknown instruction on memory");
        configure(t, (const uint8_t*)(address + step));  // LDTILECFG
    } else {
        check(op == 0x4b && rm == 4 && t.is_configured, "an unknown instruction on memory");
        check(t.rows[reg] > 0, "a tile without rows");
        for (int row = 0; row < t.rows[reg]; row++, address += step) {
            if (prefix == 2) std::memcpy((void*)address, t.tiles[reg][row], t.bytes[reg]);  // TILESTORED
            else if (prefix == 3) std::memcpy(t.tiles[reg][row], (void*)address, t.bytes[reg]);  // TILELOADD
            else fail("an unknown instruction on memory");
        }
    }
    context.gregs[REG_RIP] = (greg_t)next;
}

__attribute__((constructor)) void install() {
    const char* fault = std::getenv("OUTRIDER_TILE_FAULT");
    has_wrong_bytes = fault && !std::strcmp(fault, "wrong bytes");
    has_wrong_pairs = fault && !std::strcmp(fault, "wrong pairs");
    if (fault && !std::strcmp(fault, "crash")) return;
    struct sigaction action = {};
    action.sa_sigaction = refuse;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
}

}  // namespace

// Grants tiles; all other calls go to the C library.
extern "C" long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a[6];
    for (long& value : a) value = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && a[0] == 0x1023) return 0;
    static const auto original = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return original(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
