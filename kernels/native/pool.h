// A pool of threads that take the parts of one job after another.
//
// Parts have numbers that never repeat: a job is the numbers [begin, end), and `next_` is the first one not taken. A
// thread takes it by a compare-and-swap, which fails if another one has been faster. So a thread that the system has
// stopped for a while in between cannot take a part of a later job for one of the job that it knew.
//
// A thread without work looks for more during SPIN, longer than the time between two kernels of a step, and then sleeps.
// So does the caller while others compute the last parts.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace outrider {

class __attribute__((visibility("hidden"))) Pool {
  public:
    // Exclusive use of the pool; false when it is in use, by another thread or around this call.
    class Use {
      public:
        explicit Use(int team) : pool_(*place().load()), mine_(!pool_.used_.exchange(true)) {
            if (mine_) pool_.resize(team - 1);
        }
        ~Use() {
            if (mine_) pool_.used_.store(false);
        }
        Use(const Use&) = delete;
        explicit operator bool() const { return mine_; }

        // part(i) for each i < count, also in the calling thread.
        template <typename F>
        void run(int64_t count, const F& part) {
            pool_.run(uint32_t(count), [](const void* context, int64_t i) { (*(const F*)context)(i); }, &part);
        }

      private:
        Pool& pool_;
        const bool mine_;
    };

    // True when this process's kernels use the pool.
    static std::atomic<bool>& chosen() {
        static std::atomic<bool> value{false};
        return value;
    }

  private:
    using Part = void (*)(const void* context, int64_t i);

    static constexpr std::chrono::microseconds SPIN{50};
    static constexpr int LOOKS = 16;  // between two readings of the clock

    // The pool is never destroyed: its threads live until the process ends. A forked child has none of them.
    static std::atomic<Pool*>& place() {
        static std::atomic<Pool*> pool{new Pool};
        static const int registered = pthread_atfork(nullptr, nullptr, [] { place().store(new Pool); });
        (void)registered;
        return pool;
    }

    void run(uint32_t count, Part part, const void* context) {
        if (!count) return;
        const uint64_t begin = end_.load();
        part_.store(part, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        begin_.store(begin, std::memory_order_relaxed);
        left_.store(count, std::memory_order_relaxed);
        end_.store(begin + count);
        if (count > 1 && sleeping_.load()) {
            signal_.fetch_add(1);
            wake(signal_, count - 1);
        }
        while (take()) {}
        if (wait([&] { return !left_.load(std::memory_order_acquire); })) return;
        waiting_.store(true);
        for (uint32_t left; (left = left_.load());) sleep(left_, left);
        waiting_.store(false, std::memory_order_relaxed);
    }

    // Takes and computes a part; false when all are taken.
    bool take() {
        uint64_t i = next_.load(std::memory_order_acquire);
        while (i < end_.load(std::memory_order_acquire)) {
            const Part part = part_.load(std::memory_order_relaxed);
            const void* context = context_.load(std::memory_order_relaxed);
            const uint64_t begin = begin_.load(std::memory_order_relaxed);
            if (!next_.compare_exchange_weak(i, i + 1)) continue;
            part(context, int64_t(i - begin));
            if (left_.fetch_sub(1) == 1 && waiting_.load()) wake(left_, 1);
            return true;
        }
        return false;
    }

    bool has_parts() const { return next_.load() < end_.load(); }

    // The life of helper `number`.
    void help(int number) {
        while (number < wanted_.load()) {
            while (take()) {}
            if (wait([&] { return has_parts(); })) continue;
            const uint32_t seen = signal_.load();
            sleeping_.fetch_add(1);
            if (!has_parts() && number < wanted_.load()) sleep(signal_, seen);
            sleeping_.fetch_sub(1);
        }
    }

    void resize(int count) {
        if (count == wanted_.exchange(count)) return;
        signal_.fetch_add(1);
        wake(signal_, INT_MAX);
        for (; (int)helpers_.size() > count; helpers_.pop_back()) helpers_.back().join();
        sigset_t others, before;  // signals are for the program's own threads, but a thread's faults are its own
        sigfillset(&others);
        for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, fault);
        pthread_sigmask(SIG_SETMASK, &others, &before);
        try {
            while ((int)helpers_.size() < count)
                helpers_.emplace_back([this, number = (int)helpers_.size()] { help(number); });
        } catch (const std::system_error&) {  // no more threads here: the others take all parts, until the number changes
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Waits actively for a short time; returns true once `ready` does.
    template <typename F>
    static bool wait(F ready) {
        const auto begin = std::chrono::steady_clock::now();
        do {
            for (int look = 0; look < LOOKS; look++) {
                if (ready()) return true;
#if defined(__x86_64__) || defined(__i386__)
                __builtin_ia32_pause();
#elif defined(__aarch64__)
                asm volatile("yield");
#endif
            }
        } while (std::chrono::steady_clock::now() - begin < SPIN);
        return false;
    }

    static void sleep(std::atomic<uint32_t>& word, uint32_t seen) {
        syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    static void wake(std::atomic<uint32_t>& word, uint32_t count) {
        syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, std::min<uint32_t>(count, INT_MAX), nullptr, nullptr, 0);
    }

    // The job: written while all earlier parts are done, published by `end_`.
    std::atomic<Part> part_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<uint64_t> begin_{0};
    alignas(64) std::atomic<uint64_t> end_{0};
    alignas(64) std::atomic<uint64_t> next_{0};
    alignas(64) std::atomic<uint32_t> left_{0};  // parts that are not done
    std::atomic<bool> waiting_{false};           // for `left_`
    alignas(64) std::atomic<uint32_t> signal_{0};
    std::atomic<int> sleeping_{0};               // helpers that wait for `signal_`
    std::atomic<int> wanted_{0};
    std::atomic<bool> used_{false};
    std::vector<std::thread> helpers_;
};

}  // namespace outrider
