#include "team.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace slip {
namespace {

constexpr int kMostThreads = 256;
constexpr int kSpins = 2000;  // some tens of microseconds: as long as waking somebody takes

uint64_t word(uint32_t phase, uint32_t count) { return static_cast<uint64_t>(phase) << 32 | count; }
uint32_t phase_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
uint32_t count_of(uint64_t word) { return static_cast<uint32_t>(word); }

// Short waits cost nothing but this core; longer ones mean that somebody else needs it.
void wait_a_little(int turn) {
    if (turn < kSpins) _mm_pause();
    else sched_yield();
}

// The cores this thread may use; pinning changes nothing but which of them each worker keeps to.
std::vector<int> allowed_cores() {
    std::vector<int> cores;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &set)) cores.push_back(core);
    return cores;
}

void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// The caller keeps a core of its own while the team works, and gets its freedom back afterwards.
class PinnedCaller {
public:
    explicit PinnedCaller(int core) {
        known_ = core >= 0 && sched_getaffinity(0, sizeof before_, &before_) == 0;
        if (known_) pin(core);
    }
    ~PinnedCaller() {
        if (known_) sched_setaffinity(0, sizeof before_, &before_);
    }

private:
    cpu_set_t before_;
    bool known_;
};

}  // namespace

Team& Team::shared() {
    static Team team;
    return team;
}

uint32_t& Team::own_phase() {
    thread_local uint32_t phase = 0;
    return phase;
}

Team::~Team() {
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stopping_ = true;
    }
    wake_.notify_all();
    if (process_ == getpid())
        for (std::thread& thread : threads_) thread.join();
    else new (&threads_) std::vector<std::thread>;
}

int Team::claim(uint32_t phase, int pieces) {
    uint64_t seen = next_.load(std::memory_order_acquire);
    while (phase_of(seen) == phase && count_of(seen) < static_cast<uint32_t>(pieces))
        if (next_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return static_cast<int>(count_of(seen));
    return -1;
}

// Returns when the phase is over; one of those who see its last piece done opens the next.
void Team::close(uint32_t phase, int pieces) {
    for (int turn = 0; phase_of(next_.load(std::memory_order_acquire)) == phase; ++turn) {
        uint64_t all = word(phase, static_cast<uint32_t>(pieces));
        if (done_.compare_exchange_strong(all, word(phase + 1, 0), std::memory_order_acq_rel)) {
            next_.store(word(phase + 1, 0), std::memory_order_release);
            return;
        }
        wait_a_little(turn);
    }
}

void Team::grow(int threads) {
    if (process_ != getpid()) {
        // threads do not survive a fork; what is left of them must not be joined either
        new (&threads_) std::vector<std::thread>;
        cores_ = allowed_cores();
        process_ = getpid();
    }
    while (static_cast<int>(threads_.size()) + 1 < threads) {
        const int worker = static_cast<int>(threads_.size()) + 1;
        threads_.emplace_back([this, worker] { serve(worker); });
    }
}

// The first call that is not `call`: watched for a moment, then slept for.
long Team::sleep_until_after(long call) {
    for (int turn = 0; turn < kSpins; ++turn) {
        const long now = call_.load(std::memory_order_acquire);
        if (now / 2 != call / 2) return now;
        _mm_pause();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    wake_.wait(lock, [&] { return stopping_ || call_.load() / 2 != call / 2; });
    return call_.load();
}

// Whether the call is still open and this thread is now counted in; after its end nobody may look at it any more.
bool Team::enter(long call) {
    inside_.fetch_add(1);
    if (call % 2 == 1 && call_.load() == call) return true;
    inside_.fetch_sub(1);
    return false;
}

void Team::serve(int worker) {
    if (worker < static_cast<int>(cores_.size())) pin(cores_[worker]);
    long call = 0;
    for (;;) {
        call = sleep_until_after(call);
        if (stopping_) return;
        if (worker >= wanted_.load() || !enter(call)) continue;
        own_phase() = first_phase_;
        (*body_)();
        inside_.fetch_sub(1);
    }
}

void Team::run(int threads, const std::function<void()>& body) {
    std::lock_guard<std::mutex> turn(turn_);
    running_ = std::min(std::max(threads, 1), kMostThreads);
    first_phase_ = own_phase() = phase_of(next_.load());
    if (running_ == 1) {
        body();
        return;
    }
    grow(running_);
    body_ = &body;
    wanted_ = running_;
    PinnedCaller pinned(cores_.empty() ? -1 : cores_[0]);
    {
        std::lock_guard<std::mutex> lock(sleep_);
        call_.fetch_add(call_.load() % 2 == 0 ? 3 : 2);  // the next odd number of another pair
    }
    wake_.notify_all();
    body();
    call_.fetch_sub(1);  // closed: whoever has not come yet stays out
    for (int wait = 0; inside_.load() > 0; ++wait) wait_a_little(wait);
}

}  // namespace slip
