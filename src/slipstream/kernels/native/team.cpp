#include "team.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace slip {
namespace {

constexpr int kSpins = 2000;  // some tens of microseconds: as long as waking somebody takes

uint64_t word(uint32_t phase, uint32_t count) { return static_cast<uint64_t>(phase) << 32 | count; }
uint32_t phase_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
uint32_t count_of(uint64_t word) { return static_cast<uint32_t>(word); }

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

// The caller keeps a core of its own while the team works on something long, and gets its freedom back afterwards.
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

Team::Worker& Team::worker() {
    thread_local Worker me;
    return me;
}

// Short waits cost nothing but this core; longer ones mean that somebody else needs it.
void Team::wait_a_little(int turn) {
    if (turn < kSpins) _mm_pause();
    else sched_yield();
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

// A piece of one's own stretch, or of another's; -1 where nothing is left (or the phase is only being opened).
int Team::claim(const Worker& me, int pieces) {
    for (int i = 0; i < running_; ++i) {
        const int owner = (me.index + i) % running_;
        const int first = static_cast<int>(int64_t{pieces} * owner / running_);
        const uint32_t size = static_cast<uint32_t>(int64_t{pieces} * (owner + 1) / running_) - first;
        std::atomic<uint64_t>& next = stretches_[owner].next;
        uint64_t seen = next.load(std::memory_order_acquire);
        while (phase_of(seen) == me.phase && count_of(seen) < size)
            if (next.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel))
                return first + static_cast<int>(count_of(seen));
    }
    return -1;
}

// Whether all pieces of a phase are done; the one who sees it first opens the next phase.
bool Team::over(uint32_t phase, int pieces) {
    uint64_t seen = done_.load(std::memory_order_acquire);
    if (phase_of(seen) != phase) return true;
    if (count_of(seen) < static_cast<uint32_t>(pieces)) return false;
    if (done_.compare_exchange_strong(seen, word(phase + 1, 0), std::memory_order_acq_rel))
        for (int i = 0; i < running_; ++i) stretches_[i].next.store(word(phase + 1, 0), std::memory_order_release);
    return true;
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
        Team::worker() = {worker, first_phase_};
        (*body_)();
        inside_.fetch_sub(1);
    }
}

void Team::run(int threads, const std::function<void()>& body, bool brief) {
    std::lock_guard<std::mutex> turn(turn_);
    running_ = std::min(std::max(threads, 1), static_cast<int>(kMostThreads));
    first_phase_ = phase_of(done_.load());
    worker() = {0, first_phase_};
    // a call with more threads than the last one has stretches that nobody has opened
    for (int i = 0; i < running_; ++i) stretches_[i].next.store(word(first_phase_, 0));
    if (running_ == 1) {
        body();
        return;
    }
    grow(running_);
    body_ = &body;
    wanted_ = running_;
    PinnedCaller pinned(brief || cores_.empty() ? -1 : cores_[0]);
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
