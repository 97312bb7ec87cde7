#include "sonicmoe/types.h"

namespace sonicmoe {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr Activation kActivations[] = {
    Activation::swiglu, Activation::geglu,     Activation::geglu_tanh,
    Activation::reglu,  Activation::relu,      Activation::relu_sq,
    Activation::gelu,   Activation::gelu_tanh, Activation::silu};

}  // namespace

const char* name(DType value) noexcept {
  switch (value) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
  }
  return "?";
}

const char* name(Activation value) noexcept {
  switch (value) {
    case Activation::swiglu:
      return "swiglu";
    case Activation::geglu:
      return "geglu";
    case Activation::geglu_tanh:
      return "geglu_tanh";
    case Activation::reglu:
      return "reglu";
    case Activation::relu:
      return "relu";
    case Activation::relu_sq:
      return "relu_sq";
    case Activation::gelu:
      return "gelu";
    case Activation::gelu_tanh:
      return "gelu_tanh";
    case Activation::silu:
      return "silu";
  }
  return "?";
}

const char* name(W1Layout value) noexcept {
  switch (value) {
    case W1Layout::interleaved:
      return "interleaved";
    case W1Layout::concatenated:
      return "concatenated";
    case W1Layout::separate:
      return "separate";
  }
  return "?";
}

const char* name(RouterMode value) noexcept {
  switch (value) {
    case RouterMode::softmax_over_topk:
      return "softmax_over_topk";
    case RouterMode::topk_over_softmax:
      return "topk_over_softmax";
    case RouterMode::given:
      return "given";
  }
  return "?";
}

const char* name(DeviceType value) noexcept {
  switch (value) {
    case DeviceType::cpu:
      return "cpu";
    case DeviceType::cuda:
      return "cuda";
  }
  return "?";
}

bool is_glu(Activation value) noexcept {
  return value == Activation::swiglu || value == Activation::geglu ||
         value == Activation::geglu_tanh || value == Activation::reglu;
}

std::size_t size_of(DType value) noexcept {
  switch (value) {
    case DType::f32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::f16:
      return 2;
  }
  return 0;
}

bool parse(const std::string& text, DType* out) {
  for (DType value : kDTypes) {
    if (text == name(value)) {
      *out = value;
      return true;
    }
  }
  return false;
}

bool parse(const std::string& text, Activation* out) {
  for (Activation value : kActivations) {
    if (text == name(value)) {
      *out = value;
      return true;
    }
  }
  return false;
}

}  // namespace sonicmoe
