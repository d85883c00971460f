// Uses the pool in all ways at once; test_pool.py compiles this with a sanitizer. Exit status 1: a result is wrong.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "team.h"

using namespace outrider;

// Two phases on many parts: the second one reads what other threads wrote in the first, and one part shares work again.
static void use(int team, int rounds, int64_t count) {
    std::vector<int64_t> first(count), second(count), inner(4);
    for (int64_t round = 0; round < rounds; round++) {
        const auto write = [&](int64_t i) { first[i] += i * round; };
        const auto read = [&](int64_t i) {
            second[i] = first[i] + first[count - 1 - i];
            if (i == count / 2) parallel_for(team, 4, [&](int64_t j) { inner[j] = second[i] + j; });
        };
        parallel(team, Phase{count, write}, Phase{int64_t(0), write}, Phase{count, read});
        const int64_t expected = (count - 1) * (round * (round + 1) / 2);
        bool good = true;
        for (int64_t i = 0; i < count; i++) good &= second[i] == expected;
        for (int64_t j = 0; j < 4; j++) good &= inner[j] == expected + j;
        if (!good) {
            std::fprintf(stderr, "wrong result: team %d, round %d\n", team, int(round));
            std::exit(1);
        }
        if (round % 64 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the others fall asleep
    }
}

int main() {
    Pool::chosen().store(true);
    for (int team : {1, 2, 3, 5, 2}) use(team, 400, 7);
    std::thread other([] { use(2, 1000, 5); });
    use(3, 1000, 16);
    other.join();
    return 0;
}
