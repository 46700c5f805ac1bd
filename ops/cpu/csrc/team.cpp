#include "team.h"

#include <pthread.h>
#include <sched.h>

#include "simd.h"
#if defined(LOOM_AMX)
#include "amx.h"
#endif

namespace loom {

namespace {
// One thread's part of a run.
void work(Worker& worker, const std::function<void(Worker&)>& body) {
  body(worker);
#if defined(LOOM_AMX)
  release_amx_tiles();
#endif
  worker.finish();
}

// About 10 microseconds: longer than a phase's usual imbalance, shorter than what a sleeping
// thread of the same process (the event loop) would notice.
constexpr int kSpins = 500;
}  // namespace

void Signal::advance() {
  word_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) word_.notify_all();
}

void Signal::wait_while(uint32_t old) {
  for (int i = 0; i < kSpins; i++) {
    if (word_.load(std::memory_order_acquire) != old) return;
    pause();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (word_.load(std::memory_order_acquire) == old) word_.wait(old, std::memory_order_acquire);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void Worker::finish() {
  if (team_.size_ == 1) {
    team_.counters_[phase_ & 3].claimed.store(0, std::memory_order_relaxed);
    return;
  }
  if (id_ == 0) team_.counters_[(phase_ + 2) & 3].claimed.store(0, std::memory_order_relaxed);
  phase_++;
  uint32_t now = team_.passed_.read();
  if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_.size_) {
    team_.arrived_.store(0, std::memory_order_relaxed);
    team_.passed_.advance();
  } else {
    team_.passed_.wait_while(now);
  }
}

Team::Team(int size, bool pin) : size_(size), pin_(pin) {
  for (int id = 1; id < size; id++) threads_.emplace_back([this, id] { serve(id); });
}

Team::~Team() {
  stop_ = true;
  start_.advance();
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(Worker&)>& body) {
  std::lock_guard<std::mutex> lock(one_run_);
  thread_local const Team* pinned_for = nullptr;
  if (pin_ && pinned_for != this) {
    pin_thread(0);
    pinned_for = this;
  }
  for (auto& counter : counters_) counter.claimed.store(0, std::memory_order_relaxed);
  body_ = &body;
  start_.advance();
  Worker worker(*this, 0);
  work(worker, body);
}

void Team::serve(int id) {
  if (pin_) pin_thread(id);
  for (uint32_t seen = 0;;) {
    start_.wait_while(seen);
    seen++;
    if (stop_) return;
    Worker worker(*this, id);
    work(worker, *body_);
  }
}

void Team::pin_thread([[maybe_unused]] int id) const {
#if defined(__linux__)
  static const cpu_set_t allowed = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    return set;
  }();
  int seen = 0, cores = CPU_COUNT(&allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE && cores > 0; cpu++) {
    if (!CPU_ISSET(cpu, &allowed) || seen++ != id % cores) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
    return;
  }
#endif
}

}  // namespace loom
