// One team of threads for the whole process: engines take turns, and no thread spins while there is nothing to do.
//
// Work is a sequence of phases, each cut into pieces. A phase is over when its pieces are done, not when every thread
// has arrived: a thread that another process keeps off its core is waited for only if it holds a piece.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace slip {

class Team {
public:
    // each has a stretch in a cache line of its own; a larger team is cut to this
    static constexpr int kMostThreads = 64;

    // Runs body() on `threads` threads, of which the caller is one, and returns when no thread is in it any more. A
    // body only calls `share`, with the same phases in the same order on every thread. Calls from several threads wait
    // for each other, so that two engines do not compete for the cores. If there are as many threads as cores, each is
    // pinned to a core during the call. The caller is not pinned for `brief` work, because pinning can take longer than
    // such work.
    void run(int threads, const std::function<void()>& body, bool brief = false);

    // Runs one phase: each(0), ..., each(pieces - 1), every one called once. Each thread works through its own stretch
    // of pieces, because memory is fast only if it is read in order, and then helps the other threads with
    // their stretches.
    template <class Each>
    void share(int pieces, Each each) {
        Worker& me = worker();
        for (int turn = 0; !over(me.phase, pieces);) {
            const int piece = claim(me, pieces);
            if (piece < 0) {
                wait_a_little(turn++);
                continue;
            }
            each(piece);
            done_.fetch_add(1, std::memory_order_acq_rel);
            turn = 0;
        }
        ++me.phase;
    }

    int threads() const { return running_; }
    static Team& shared();
    Team();

private:
    struct Worker {
        int index = 0;
        uint32_t phase = 0;
    };
    struct alignas(64) Stretch {
        std::atomic<uint64_t> next{0};  // the phase, and how many pieces of the stretch are taken
    };
    static Worker& worker();
    static void wait_a_little(int turn);
    int claim(const Worker& me, int pieces);
    bool over(uint32_t phase, int pieces);
    int grow(int threads);
    void serve(int worker);
    long sleep_until_after(long call);
    bool enter(long call);

    std::mutex turn_;
    std::mutex sleep_;
    std::condition_variable wake_;
    const cpu_set_t cores_;  // the cores that the process may use
    int workers_ = 0;        // threads that were started; the caller is one more
    int running_ = 0;
    uint32_t first_phase_ = 0;  // the first phase of the current call
    const std::function<void()>* body_ = nullptr;
    std::atomic<long> call_{0};        // twice the number of calls so far, plus one while the last one is open
    std::atomic<int> wanted_{0};       // the number of threads for the open call
    std::atomic<int> inside_{0};       // how many threads other than the caller are in its body
    Stretch stretches_[kMostThreads];
    alignas(64) std::atomic<uint64_t> done_{0};  // the phase, and how many of its pieces are done
};

}  // namespace slip
