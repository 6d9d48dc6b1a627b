// The words that tell of the end of a process: which of them the kernel changes, and which it leaves alone.
#include "transport/life_mark.h"

#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "stress/harness.h"

extern char** environ;

namespace ringreduce::stress {
namespace {

constexpr int kWords = 4;

LifeWord* words_in(int memfd) {
  void* const memory = mmap(nullptr, kWords * sizeof(LifeWord), PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  check(memory != MAP_FAILED, "life mark: no shared memory");
  return static_cast<LifeWord*>(memory);
}

// Marks words 0, 1 and 2, and takes the mark of `removed` away; a forked child of this process comes and goes.
pid_t start_marked(int memfd, int removed) {
  int ready[2];
  check(pipe(ready) == 0, "life mark: no pipe");
  std::string texts[]{"stress", "hold_life_marks", std::to_string(memfd), std::to_string(removed),
                      std::to_string(ready[1])};
  char* arguments[]{texts[0].data(), texts[1].data(), texts[2].data(), texts[3].data(), texts[4].data(), nullptr};
  pid_t child = 0;
  check(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environ) == 0, "life mark: no process");
  close(ready[1]);
  char word = 0;
  check(read(ready[0], &word, 1) == 1, "life mark: the process does not mark");
  close(ready[0]);
  return child;
}

}  // namespace

void hold_life_marks(int memfd, int removed, int ready) {
  LifeWord* const words = words_in(memfd);
  std::unique_ptr<LifeMark> marks[kWords - 1];
  for (int i = 0; i < kWords - 1; ++i) marks[i] = std::make_unique<LifeMark>(words[i]);
  marks[removed].reset();
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  check(write(ready, "", 1) == 1, "life mark: nobody waits");
  for (;;) pause();
}

void stress_life_mark() {
  for (int removed = 0; removed < kWords - 1; ++removed) {
    const int memfd = memfd_create("stress", 0);
    check(ftruncate(memfd, kWords * sizeof(LifeWord)) == 0, "life mark: no memory");
    LifeWord* const words = words_in(memfd);
    auto own = std::make_unique<LifeMark>(words[kWords - 1]);
    const pid_t child = start_marked(memfd, removed);
    for (int i = 0; i < kWords; ++i) check(!words[i].ends(), "life mark: a process that lives has ended");
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    for (int i = 0; i < kWords - 1; ++i)
      check(words[i].ends() == (i != removed), "life mark: word " + std::to_string(i) + " is wrong after the end");
    check(!words[kWords - 1].ends(), "life mark: this process has not ended");
    own.reset();  // before its word goes
    munmap(words, kWords * sizeof(LifeWord));
    close(memfd);
  }
  std::printf("life mark: one of several taken away, a forked child, SIGKILL\n");
}

}  // namespace ringreduce::stress
