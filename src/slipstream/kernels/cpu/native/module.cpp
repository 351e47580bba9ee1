// What the machine can run; Python asks when it loads the library.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "amx.h"

namespace slip {

AmxTile amx_tile = nullptr;
void (*amx_enter)() = nullptr;
void (*amx_leave)() = nullptr;
int64_t (*amx_products)(int) = nullptr;

}  // namespace slip

namespace {

constexpr int kRequestTiles = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;          // XFEATURE_XTILEDATA

}  // namespace

SLIP_VISIBLE int slip_has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

SLIP_VISIBLE int slip_has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

// Whether the processor has int8 tiles and the kernel lets this process, including threads made later, use them.
SLIP_VISIBLE int slip_request_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const bool tiles = d & (1u << 24), products = d & (1u << 25);
    return tiles && products && syscall(SYS_arch_prctl, kRequestTiles, kTileData) == 0;
}

SLIP_VISIBLE void slip_use_amx(int use) {
    slip::amx_tile = use ? slip::amx::multiply_tile : nullptr;
    slip::amx_enter = use ? slip::amx::enter : nullptr;
    slip::amx_leave = use ? slip::amx::leave : nullptr;
    slip::amx_products = use ? slip::amx::products : nullptr;
}
