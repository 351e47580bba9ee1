#include "team.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace slip {
namespace {

constexpr long kMostThreads = 0x3ff;
constexpr int kSpins = 4000;  // some tens of microseconds: the gap between two calls of one step

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

Team::~Team() {
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
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
        threads_.emplace_back([this, worker, seen = call_.load()] {
            if (worker < static_cast<int>(cores_.size())) pin(cores_[worker]);
            serve(worker, seen);
        });
    }
}

// The first call that is not `call`: watched for a moment, then slept for.
long Team::after(long call) {
    for (int spin = 0; spin < kSpins; ++spin) {
        const long now = call_.load(std::memory_order_acquire);
        if (now != call) return now;
        _mm_pause();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    wake_.wait(lock, [&] { return stopping_ || call_.load() != call; });
    return call_.load();
}

void Team::serve(int worker, long call) {
    for (;;) {
        call = after(call);
        if (stopping_) return;
        if (worker < (call & kMostThreads)) {
            (*body_)(worker);
            busy_.fetch_sub(1, std::memory_order_release);
        }
    }
}

void Team::run(int threads, const std::function<void(int)>& body) {
    std::lock_guard<std::mutex> turn(turn_);
    threads = std::min(std::max(threads, 1), static_cast<int>(kMostThreads));
    running_ = threads;
    arrived_ = 0;
    next_ = 0;
    if (threads == 1) {
        body(0);
        return;
    }
    grow(threads);
    body_ = &body;
    PinnedCaller pinned(cores_.empty() ? -1 : cores_[0]);
    busy_ = threads - 1;
    {
        std::lock_guard<std::mutex> lock(sleep_);
        call_.store(((call_.load() & ~kMostThreads) + kMostThreads + 1) | threads, std::memory_order_release);
    }
    wake_.notify_all();
    body(0);
    for (int spin = 0; busy_.load(std::memory_order_acquire) > 0; ++spin) {
        if (spin < kSpins) _mm_pause();
        else sched_yield();
    }
}

void Team::barrier() {
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == running_) {
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spin = 0; phase_.load(std::memory_order_acquire) == phase; ++spin) {
        if (spin < kSpins) _mm_pause();
        else sched_yield();  // another process holds a core: let it finish sooner
    }
}

}  // namespace slip
