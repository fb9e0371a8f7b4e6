// A call's threads: the one that runs it, and helpers from XLA's own pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paged {

// Rounding to nearest, subnormal numbers kept: XLA flushes them on its threads, and not on all alike.
class PlainArithmetic {
 public:
#if defined(__x86_64__)
  PlainArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~PlainArithmetic() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  PlainArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~PlainArithmetic() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
};

inline void Relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Runs phases of independent tasks one after the other. A helper that comes late, or never, only makes it slower: the
// caller takes tasks too, and waits for nothing but tasks that somebody has taken.
class Team {
 public:
  template <typename Pool>
  Team(Pool& pool, int64_t helpers) : state_(std::make_shared<State>()) {
    state_->caller = std::this_thread::get_id();
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([state = state_] { Help(*state); });
    helpers_ = helpers;
  }
  Team(const Team&) = delete;
  ~Team() { state_->ticket.store(kOver, std::memory_order_release); }

  int64_t threads() const { return helpers_ + 1; }

  // run(0) … run(tasks − 1), in any order, on any of the threads; returns when all are done.
  template <typename Function>
  void Run(int64_t tasks, const Function& run) {
    if (helpers_ == 0 || tasks <= 1) {
      for (int64_t i = 0; i < tasks; ++i) run(i);
      return;
    }
    for (int64_t first = 0; first < tasks; first += kMost) {
      const int64_t count = tasks - first < kMost ? tasks - first : kMost;
      const auto part = [&](int64_t i) { run(first + i); };
      RunPhase(count, &part, [](const void* f, int64_t i) { (*static_cast<const decltype(part)*>(f))(i); });
    }
  }

 private:
  // A ticket is phase, number of tasks and next task in one word, so that nobody can take a task of a phase that is
  // over: whoever has taken one keeps the phase, and what it points to, alive.
  static constexpr int kBits = 20;
  static constexpr int64_t kMost = (int64_t{1} << kBits) - 1;
  static constexpr uint64_t kOver = ~uint64_t{0};
  static constexpr int kSpins = 4000;

  struct State {
    std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> done{0};
    void (*call)(const void*, int64_t) = nullptr;
    const void* function = nullptr;
    std::thread::id caller;
  };

  static bool Take(State& state) {
    uint64_t ticket = state.ticket.load(std::memory_order_acquire);
    while (ticket != kOver) {
      const uint64_t next = ticket & kMost, tasks = ticket >> kBits & kMost;
      if (next >= tasks) return false;
      if (state.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
        state.call(state.function, static_cast<int64_t>(next));
        state.done.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  static void Help(State& state) {
    // A pool that is full, or gone, runs what it is given at once: the caller would wait for itself.
    if (std::this_thread::get_id() == state.caller && state.ticket.load(std::memory_order_acquire) != kOver) return;
    PlainArithmetic plain;
    for (int idle = 0; state.ticket.load(std::memory_order_acquire) != kOver;) {
      if (Take(state)) {
        idle = 0;
      } else if (++idle < kSpins) {
        Relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

  void RunPhase(int64_t tasks, const void* function, void (*call)(const void*, int64_t)) {
    State& state = *state_;
    state.call = call;
    state.function = function;
    state.done.store(0, std::memory_order_relaxed);
    const uint64_t phase = ++phase_ & ((uint64_t{1} << (63 - 2 * kBits)) - 1);
    state.ticket.store(phase << (2 * kBits) | static_cast<uint64_t>(tasks) << kBits, std::memory_order_release);
    while (Take(state)) {
    }
    for (int idle = 0; state.done.load(std::memory_order_acquire) != tasks;) {
      if (++idle < kSpins) {
        Relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

  std::shared_ptr<State> state_;
  int64_t helpers_ = 0;
  uint64_t phase_ = 0;
};

}  // namespace paged
