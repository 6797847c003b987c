// How the threads of a forward share its work, and wait for each other.

#pragma once

#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "vectors.h"

namespace {

// How often a thread looks whether the others have come, before it sleeps. The threads of a step come within
// microseconds of each other, and are woken within tens of them. [measured] OpenMP's own barrier looks a hundred times
// once a process has more of its threads than processors, as with two engines in one server: a step of 43 ms on a Xeon
// slept a hundred times, and took 47. Where another program needs the processor, sleeping lets it have it.
constexpr int LOOKS = 2000;

// What the threads of a parallel region have in common: the turns of a product that were taken, and where they meet.
struct Team {
    std::atomic<int64_t> taken{0};
    alignas(LINE) std::atomic<int32_t> come{0}, meeting{0}, asleep{0};
};

// A thread's part in a team: a thread that is held up, by other work of the processor, leaves the rest of the turns to
// the others, and knows its next turn before it begins with one.
class Member {
public:
    explicit Member(Team& team) : team(team), threads(omp_get_num_threads()), own(omp_get_thread_num()) {}

    // The next of `count` turns; `count` or more where none is left. Every thread asks until it is told so, once.
    int64_t take() { return team.taken.fetch_add(1, std::memory_order_relaxed) - before; }

    // All have been taken. Returns when all threads are done with theirs.
    void end(int64_t count) {
        before += count + threads;
        meet();
    }

    // Each of `count` is done by one thread, in stretches of the same length. Returns when all are done.
    template <class F> void share(int64_t count, F each) {
        const int64_t end = count * (own + 1) / threads;
        for (int64_t i = count * own / threads; i < end; i++) each(i);
        meet();
    }

    // Each of `count` is done by one thread, by the next that is free. Returns when all are done.
    template <class F> void deal(int64_t count, F each) {
        for (int64_t turn = take(); turn < count; turn = take()) each(turn);
        end(count);
    }

    // Returns when all threads have come here.
    void meet() {
        const int32_t now = team.meeting.load(std::memory_order_relaxed);
        if (team.come.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            team.come.store(0, std::memory_order_relaxed);
            team.meeting.store(now + 1);  // before it is asked who sleeps, who looks once more before they do
            if (team.asleep.load()) wake();
            return;
        }
        for (int look = 0; look < LOOKS; look++) {
            if (team.meeting.load(std::memory_order_acquire) != now) return;
            __builtin_ia32_pause();
        }
        team.asleep.fetch_add(1);
        while (team.meeting.load() == now) sleep(now);
        team.asleep.fetch_sub(1);
    }

    const int threads, own;  // how many, and which of them

private:
    static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t), "the system looks at the number itself");
    void sleep(int32_t now) { syscall(SYS_futex, &team.meeting, FUTEX_WAIT_PRIVATE, now, nullptr); }
    void wake() { syscall(SYS_futex, &team.meeting, FUTEX_WAKE_PRIVATE, threads); }

    Team& team;
    int64_t before = 0;
};

}  // namespace
