#include "team.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>

namespace slip {
namespace {

constexpr int kSpins = 2000;  // some tens of microseconds, which is as long as waking a thread takes

uint64_t word(uint32_t phase, uint32_t count) { return static_cast<uint64_t>(phase) << 32 | count; }
uint32_t phase_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
uint32_t count_of(uint64_t word) { return static_cast<uint32_t>(word); }

// Returns the cores that this thread may use.
cpu_set_t allowed_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof set, &set);
    return set;
}

// Returns the core to which thread `worker` of a team of `threads` is pinned, as a set, or all cores if it is not. Only
// a team that fills its cores is pinned: several small teams on a large machine would otherwise share the same few
// cores.
cpu_set_t core_of(int worker, int threads, const cpu_set_t& allowed) {
    if (threads != CPU_COUNT(&allowed)) return allowed;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &allowed) && worker-- == 0) CPU_SET(core, &set);
    return set;
}

// Pins the caller to a core while the team does long work, and restores its cores afterwards.
class PinnedCaller {
public:
    PinnedCaller(int threads, const cpu_set_t& allowed) : pinned_(threads == CPU_COUNT(&allowed)) {
        if (!pinned_) return;
        const cpu_set_t own = core_of(0, threads, allowed);
        pinned_ = sched_getaffinity(0, sizeof before_, &before_) == 0 && sched_setaffinity(0, sizeof own, &own) == 0;
    }
    ~PinnedCaller() {
        if (pinned_) sched_setaffinity(0, sizeof before_, &before_);
    }

private:
    cpu_set_t before_;
    bool pinned_;
};

// The team is never destroyed, because at the end of the process another thread may still be inside it.
Team* team = new Team;

// A forked child has only one thread, and the team that it inherits may be locked or half changed for good. It
// therefore gets a new team. The C library allows this handler to allocate.
void renew_team() { team = new Team; }

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, renew_team);

}  // namespace

Team& Team::shared() { return *team; }

Team::Team() : cores_(allowed_cores()) {}

Team::Worker& Team::worker() {
    thread_local Worker me;
    return me;
}

// Waits. A short wait costs only this core; a longer one means that another thread needs the core, so it is yielded.
void Team::wait_a_little(int turn) {
    if (turn < kSpins) _mm_pause();
    else sched_yield();
}

// Takes a piece of the worker's own stretch, or of another's; returns -1 if none is left or the phase is being opened.
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

// Whether all pieces of a phase are done; the first thread that sees it opens the next phase.
bool Team::over(uint32_t phase, int pieces) {
    uint64_t seen = done_.load(std::memory_order_acquire);
    if (phase_of(seen) != phase) return true;
    if (count_of(seen) < static_cast<uint32_t>(pieces)) return false;
    if (done_.compare_exchange_strong(seen, word(phase + 1, 0), std::memory_order_acq_rel))
        for (int i = 0; i < running_; ++i) stretches_[i].next.store(word(phase + 1, 0), std::memory_order_release);
    return true;
}

// Starts missing workers as far as the system allows; returns how many threads there are for a call.
int Team::grow(int threads) {
    try {
        for (; workers_ + 1 < threads; ++workers_)
            std::thread([this, worker = workers_ + 1] { serve(worker); }).detach();
    } catch (const std::system_error&) {
        return workers_ + 1;
    }
    return threads;
}

// Waits for the first call that is not `call`: it watches for a moment and then sleeps.
long Team::sleep_until_after(long call) {
    for (int turn = 0; turn < kSpins; ++turn) {
        const long now = call_.load(std::memory_order_acquire);
        if (now / 2 != call / 2) return now;
        _mm_pause();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    wake_.wait(lock, [&] { return call_.load() / 2 != call / 2; });
    return call_.load();
}

// Whether the call is still open, with this thread counted in; after its end no thread may look at the call any more.
bool Team::enter(long call) {
    inside_.fetch_add(1);
    if (call % 2 == 1 && call_.load() == call) return true;
    inside_.fetch_sub(1);
    return false;
}

void Team::serve(int worker) {
    int placed = 0;  // the size of the team for which this thread's cores were chosen
    for (long call = 0;;) {
        call = sleep_until_after(call);
        const int wanted = wanted_.load();
        if (worker >= wanted) continue;
        if (placed != wanted) {
            const cpu_set_t own = core_of(worker, wanted, cores_);
            sched_setaffinity(0, sizeof own, &own);
            placed = wanted;
        }
        if (!enter(call)) continue;
        Team::worker() = {worker, first_phase_};
        (*body_)();
        inside_.fetch_sub(1);
    }
}

void Team::run(int threads, const std::function<void()>& body, bool brief) {
    std::lock_guard<std::mutex> turn(turn_);
    running_ = grow(std::clamp(threads, 1, static_cast<int>(kMostThreads)));
    first_phase_ = phase_of(done_.load());
    worker() = {0, first_phase_};
    // a call with more threads than the last one has stretches that no thread has opened yet
    for (int i = 0; i < running_; ++i) stretches_[i].next.store(word(first_phase_, 0));
    if (running_ == 1) {
        body();
        return;
    }
    body_ = &body;
    wanted_ = running_;
    PinnedCaller pinned(brief ? 0 : running_, cores_);
    {
        std::lock_guard<std::mutex> lock(sleep_);
        call_.fetch_add(call_.load() % 2 == 0 ? 3 : 2);  // the next odd number of another pair
    }
    wake_.notify_all();
    body();
    call_.fetch_sub(1);  // closes the call, so that a thread that has not entered yet stays out
    for (int wait = 0; inside_.load() > 0; ++wait) wait_a_little(wait);
}

}  // namespace slip
