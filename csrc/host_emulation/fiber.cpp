#include "fiber.h"

#include <cstdint>
#include <cstdlib>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace longspark::emulation {

namespace {
thread_local Fiber* starting = nullptr;
}

#if defined(__x86_64__)
// Saves the callee-saved registers on the present stack, stores its pointer to *save and goes on
// with the stack `resume`. swapcontext would do, but makes a system call each time: a factor of
// ten.
extern "C" void longspark_switch_stack(void** save, void* resume);
asm(R"(
.text
.hidden longspark_switch_stack
.globl longspark_switch_stack
.type longspark_switch_stack, @function
longspark_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size longspark_switch_stack, .-longspark_switch_stack
)");
#endif

void Fiber::start(std::function<void()> body) {
  if (!stack_) stack_.reset(new char[kStackBytes]);
  body_ = std::move(body);
  inside_fake_stack_ = nullptr;
#if defined(__x86_64__)
  // As if enter() had just been called: 16-byte aligned before the return address is pushed.
  auto top = reinterpret_cast<uintptr_t>(stack_.get() + kStackBytes) & ~uintptr_t{15};
  void** frame = reinterpret_cast<void**>(top) - 2;
  *frame = reinterpret_cast<void*>(&Fiber::enter);
  for (int i = 0; i < 6; ++i) *--frame = nullptr;
  inside_ = frame;
#else
  getcontext(&inside_);
  inside_.uc_stack.ss_sp = stack_.get();
  inside_.uc_stack.ss_size = kStackBytes;
  inside_.uc_link = nullptr;
  makecontext(&inside_, &Fiber::enter, 0);
#endif
}

void Fiber::enter() {
  Fiber* self = starting;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &self->outside_bottom_, &self->outside_size_);
#endif
  self->body_();
  self->switch_out(true);
  std::abort();  // a finished fiber is never resumed
}

void Fiber::switch_in() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&outside_fake_stack_, stack_.get(), kStackBytes);
#endif
  starting = this;
#if defined(__x86_64__)
  longspark_switch_stack(&outside_, inside_);
#else
  swapcontext(&outside_, &inside_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(outside_fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::switch_out([[maybe_unused]] bool finished) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(finished ? nullptr : &inside_fake_stack_, outside_bottom_,
                                 outside_size_);
#endif
#if defined(__x86_64__)
  longspark_switch_stack(&inside_, outside_);
#else
  swapcontext(&inside_, &outside_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(inside_fake_stack_, &outside_bottom_, &outside_size_);
#endif
}

void Fiber::resume() { switch_in(); }

void Fiber::yield() { switch_out(false); }

}  // namespace longspark::emulation
