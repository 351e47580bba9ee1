// One team of pinned threads for the whole process: engines take turns, nobody spins while there is nothing to do.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace slip {

class Team {
public:
    // Runs body(worker) on `threads` threads, the caller being worker 0, and returns when all are through.
    // Calls from several threads wait for each other: two engines share the cores instead of fighting for them.
    void run(int threads, const std::function<void(int)>& body);

    // Inside body: nobody goes on before all have come here. Starts a new round of `take`.
    void barrier();
    // Inside body: the next piece of work that nobody has taken since the last barrier, counted from 0.
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    int threads() const { return running_; }
    static Team& shared();
    ~Team();

private:
    void grow(int threads);
    void serve(int worker, long call);
    long after(long call);

    std::mutex turn_;
    std::mutex sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
    std::vector<int> cores_;
    int process_ = 0;
    const std::function<void(int)>* body_ = nullptr;
    std::atomic<long> call_{0};  // how many calls there were, and how many threads the last one wants, in one word
    int running_ = 0;
    std::atomic<int> busy_{0};
    std::atomic<int> arrived_{0};
    std::atomic<int> phase_{0};
    std::atomic<int> next_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace slip
