// Preloaded, it leaves every thread but the first without memory for C++ objects, once `deny_threads` has been called.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>

static std::atomic<bool> denies{false};
static std::atomic<int> num_denied{0};

extern "C" void deny_threads() { denies = true; }
extern "C" int denied() { return num_denied; }

void* operator new(std::size_t size) {
  if (denies && syscall(SYS_gettid) != getpid()) {
    ++num_denied;
    throw std::bad_alloc();
  }
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
