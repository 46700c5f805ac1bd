// A team of threads that runs one function on all of them, with barriers inside.
//
// A model step is some hundred short phases. Starting a parallel loop for each would cost more
// than the phases, so the whole step is one `Team::run`, and a phase ends in a barrier that spins
// for some microseconds before it sleeps: short waits cost no system call, long ones no core.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace loom {

// A 32-bit word that threads wait on: spinning first, then asleep.
class Signal {
 public:
  uint32_t read() const { return word_.load(std::memory_order_acquire); }
  void advance();
  void wait_while(uint32_t old);

 private:
  alignas(64) std::atomic<uint32_t> word_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

class Team;

// One thread's view of a `Team::run`.
class Worker {
 public:
  Worker(Team& team, int id) : team_(team), id_(id) {}

  int id() const { return id_; }
  int size() const;

  // The first piece of the phase for this thread is `id()`, the next ones are claimed: a thread
  // that the system held up gets fewer.
  int64_t claim();

  // Ends the phase: returns when all threads are here.
  void finish();

  // body(i) for i in 0 .. n - 1, each once, over all threads; ends the phase.
  template <class Body>
  void parallel_for(int64_t n, Body&& body) {
    for (int64_t i = id_; i < n; i = claim()) body(i);
    finish();
  }

 private:
  Team& team_;
  int id_;
  uint32_t phase_ = 0;
};

class Team {
 public:
  // size: threads, the caller's included. pin: bind thread i to the i-th allowed core.
  Team(int size, bool pin);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs body(worker) on every thread, the calling one as worker 0. One run at a time.
  void run(const std::function<void(Worker&)>& body);

 private:
  friend class Worker;
  void serve(int id);
  void pin_thread(int id) const;

  int size_;
  bool pin_;
  std::mutex one_run_;
  std::vector<std::thread> threads_;
  const std::function<void(Worker&)>* body_ = nullptr;
  bool stop_ = false;
  Signal start_;
  Signal passed_;  // advances when all threads reached a barrier
  alignas(64) std::atomic<int> arrived_{0};
  // Phase p counts its claims in counter p % 4; counter p + 2 is cleared meanwhile.
  struct alignas(64) Counter {
    std::atomic<int64_t> claimed{0};
  };
  Counter counters_[4];
};

inline int Worker::size() const { return team_.size_; }

inline int64_t Worker::claim() {
  auto& counter = team_.counters_[phase_ & 3].claimed;
  return team_.size_ + counter.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace loom
