// A fiber: a function with its own stack that can be left in the middle and resumed.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace longspark::emulation {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes `body` what the next resume() begins. The stack is kept from one body to the next; a body
  // that was left unfinished is dropped without unwinding. `body` must not throw.
  void start(std::function<void()> body);

  // Runs the body until it yields or returns.
  void resume();

  // From inside the body: back to where resume() was called.
  void yield();

 private:
  static void enter();
  void switch_in();
  void switch_out(bool finished);

  static constexpr size_t kStackBytes = 64 * 1024;
  std::unique_ptr<char[]> stack_;
  std::function<void()> body_;
#if defined(__x86_64__)
  void* inside_ = nullptr;
  void* outside_ = nullptr;
#else
  ucontext_t inside_, outside_;
#endif
  // AddressSanitizer's view of the two stacks; unused without it.
  void* inside_fake_stack_ = nullptr;
  void* outside_fake_stack_ = nullptr;
  const void* outside_bottom_ = nullptr;
  size_t outside_size_ = 0;
};

}  // namespace longspark::emulation
