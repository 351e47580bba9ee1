// Measures the machine's limits for lower bounds of a step's time: bytes read and int8 products per second.
#include "matmul.h"
#include "weights.h"

// Reads memory from front to back on all threads; the result only keeps the compiler from removing the loop.
SLIP_EXPORT(int64_t, slip_read)(const int32_t* data, int64_t count, int threads) {
    using namespace slip;
    using namespace slip::SLIP_ISA;
    constexpr int64_t kPiece = 1 << 16;
    std::atomic<int64_t> total{0};
    Team& team = Team::shared();
    team.run(threads, [&] {
        team.share(static_cast<int>(count / kPiece), [&](int piece) {
            const int32_t* from = data + piece * kPiece;
            Ints sums[4] = {set1(0), set1(0), set1(0), set1(0)};
            for (int64_t i = 0; i < kPiece; i += 4 * kLanes)
                for (int part = 0; part < 4; ++part) sums[part] = sums[part] + load(from + i + part * kLanes);
            total += sum(sums[0] + sums[1] + sums[2] + sums[3]);
        });
    });
    return total;
}

// Multiplies codes in registers `rounds` times on every thread; returns the number of products.
SLIP_EXPORT(int64_t, slip_products)(int rounds, int threads) {
    using namespace slip;
    using namespace slip::SLIP_ISA;
    constexpr int kChains = 8;  // independent sums, so that none waits for another
    alignas(64) const uint8_t codes[64] = {1, 2, 3};
    const int8_t four[4] = {1, -2, 3, -4};
    std::atomic<int64_t> kept{0};
    Team& team = Team::shared();
    if (amx_products != nullptr) {
        team.run(threads, [&] { team.share(threads, [&](int) { kept += amx_products(rounds); }); });
        return kept;
    }
    team.run(threads, [&] {
        team.share(threads, [&](int) {
            Codes quad = load_codes(codes);
            Ints sums[kChains];
            for (Ints& each : sums) each = set1(0);
            for (int i = 0; i < rounds; ++i) {
#pragma GCC unroll 8
                for (int chain = 0; chain < kChains; ++chain) sums[chain] = dot<false>(sums[chain], quad, four);
            }
            for (const Ints& each : sums) kept += sum(each) & 0;
        });
    });
    return int64_t{rounds} * kChains * 64 * threads;
}
