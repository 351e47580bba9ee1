// One team of threads for the whole process: engines take turns, nobody spins while there is nothing to do.
//
// Work is a sequence of phases, each cut into pieces. A phase is over when its pieces are done, not when everybody has
// come by: a thread that some other process keeps off its core is not waited for unless it holds a piece.
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
    static constexpr int kMostThreads = 64;

    // Runs body() on `threads` threads, the caller being one of them, and returns when none is left in it. Bodies do
    // nothing but `share`, with the same phases in the same order on every thread. Calls from several threads wait for
    // each other: two engines share the cores instead of fighting for them. Where the threads
    // are as many as the cores, each is held on a core of its own meanwhile; the caller only unless the work is `brief`,
    // as that takes the system longer than some of it.
    void run(int threads, const std::function<void()>& body, bool brief = false);

    // One phase: each(0), ..., each(pieces - 1), every one called once. Each thread goes through a stretch of its own,
    // since memory is fast only where it is read in order, and then helps the others with theirs.
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
        std::atomic<uint64_t> next{0};  // phase, and how many pieces of the stretch are taken
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
    const cpu_set_t cores_;  // what the process may use
    int workers_ = 0;        // threads that were started; the caller is one more
    int running_ = 0;
    uint32_t first_phase_ = 0;  // of the call at hand
    const std::function<void()>* body_ = nullptr;
    std::atomic<long> call_{0};        // how many calls there were, times two, plus one while the last one is open
    std::atomic<int> wanted_{0};       // threads the open call asks for
    std::atomic<int> inside_{0};       // threads, other than the caller, that are in its body
    Stretch stretches_[kMostThreads];
    alignas(64) std::atomic<uint64_t> done_{0};  // phase, and how many of its pieces are done
};

}  // namespace slip
