// SPDX-License-Identifier: Apache-2.0
// One boxed kernel that runs any ATen operator of the NPU on PyTorch's CPU kernels, over the same memory.
//
// Where the shape of the results is known beforehand (from the operator's meta kernel), it is queued on the
// current stream as a kernel is; else it waits for the stream and runs at once, as operators whose result
// depends on data do on hardware.
#include "boxed.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <optional>
#include <set>

#include "launch.h"

namespace cann_on_host {
namespace {

using torch::jit::Stack;

bool is_optional_tensor_list(const c10::IValue& value) {
  if (!value.isList() || value.toList().elementType()->kind() != c10::TypeKind::OptionalType) return false;
  for (const c10::IValue& element : value.toListRef()) {
    if (!element.isNone() && !element.isTensor()) return false;
  }
  return true;
}

// `value` with `convert` applied to every tensor in it.
template <class Convert>
c10::IValue convert_tensors(const c10::IValue& value, Convert convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> converted;
    for (const at::Tensor& tensor : value.toTensorVector()) converted.push_back(convert(tensor));
    return converted;
  }
  if (is_optional_tensor_list(value)) {
    c10::List<std::optional<at::Tensor>> converted;
    for (const c10::IValue& element : value.toListRef()) {
      converted.push_back(element.isNone() ? std::nullopt : std::optional<at::Tensor>(convert(element.toTensor())));
    }
    return converted;
  }
  return value;
}

at::Tensor to_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

at::Tensor to_npu_like(const at::Tensor& meta, c10::Device device) {
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

std::string full_name(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  return schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
}

// One call of an operator: its arguments, with the tensors of the NPU aliased on the CPU.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), size_(op.schema().arguments().size()), first_(stack->size() - size_) {
    alias_arguments();
  }

  // Results take the place of the arguments on the stack.
  void run() {
    if (device_ && (run_in_place_later() || run_later())) return;
    run_now();
  }

 private:
  const c10::IValue& argument(size_t i) const { return (*stack_)[first_ + i]; }

  void alias_arguments() {
    aliased_.clear();
    aliases_.clear();
    for (size_t i = 0; i < size_; i++) {
      const c10::IValue& value = argument(i);
      if (value.isDevice() && value.toDevice().type() == kNpu) {
        device_ = value.toDevice();
        aliased_.emplace_back(c10::Device(c10::kCPU));
      } else if (value.isGenerator()) {
        aliased_.emplace_back();
      } else {
        aliased_.push_back(convert_tensors(value, [this](const at::Tensor& tensor) { return alias(tensor); }));
      }
    }
    if (device_ && !device_->has_index()) device_ = c10::impl::VirtualGuardImpl(kNpu).getDevice();
  }

  at::Tensor alias(const at::Tensor& tensor) {
    if (!is_npu(tensor)) return tensor;
    device_ = tensor.device();
    for (const auto& [npu, cpu] : aliases_) {
      if (npu.is_same(tensor)) return cpu;
    }
    aliases_.emplace_back(tensor, on_cpu(tensor));
    return aliases_.back().second;
  }

  bool has_writes() const {
    for (const auto& argument : op_.schema().arguments()) {
      if (writes(argument)) return true;
    }
    return false;
  }

  // The arguments as the queued work shall see them: CPU tensors may change after this call, so they are copied.
  Stack captured() const {
    Stack arguments = aliased_;
    for (size_t i = 0; i < size_; i++) {
      const c10::IValue& value = argument(i);
      if (value.isTensor() && value.toTensor().defined() && !is_npu(value.toTensor())) {
        arguments[i] = value.toTensor().clone();
      }
    }
    return arguments;
  }

  bool run_in_place_later() {
    const auto& schema = op_.schema();
    if (!has_writes()) return false;
    std::vector<at::Tensor> outputs;
    for (size_t i = 0; i < size_; i++) {
      if (!writes(schema.arguments()[i])) continue;
      const c10::IValue& value = argument(i);
      // Empty: an `out` argument that the operator will resize.
      if (!value.isTensor() || !is_npu(value.toTensor()) || !value.toTensor().numel()) return false;
      outputs.push_back(value.toTensor());
    }
    Stack results;
    for (const auto& result : schema.returns()) {
      if (!result.alias_info()) return false;
      for (size_t i = 0; i < size_; i++) {
        const auto* info = schema.arguments()[i].alias_info();
        if (info && *info == *result.alias_info()) {
          results.push_back(argument(i));
          break;
        }
      }
    }
    launch(*device_, full_name(op_), outputs,
           [op = op_, arguments = captured()]() mutable { op.callBoxed(arguments); });
    replace_arguments(results);
    return true;
  }

  bool run_later() {
    if (has_writes()) return false;
    Stack meta;
    for (size_t i = 0; i < size_; i++) {
      const c10::IValue& value = aliased_[i];
      meta.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kMeta)) : convert_tensors(value, to_meta));
    }
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      op_.callBoxed(meta);
    } catch (const std::exception&) {
      return false;  // no meta kernel, or the shape depends on data
    }
    std::vector<at::Tensor> outputs;
    Stack results;
    for (const c10::IValue& value : meta) {
      if (!(value.isTensor() && value.toTensor().defined()) && !value.isTensorList()) return false;
      results.push_back(convert_tensors(value, [&](const at::Tensor& tensor) {
        outputs.push_back(to_npu_like(tensor, *device_));
        return outputs.back();
      }));
    }
    std::vector<at::Tensor> destinations;
    for (const at::Tensor& output : outputs) destinations.push_back(on_cpu(output));
    launch(*device_, full_name(op_), outputs, [op = op_, arguments = captured(), destinations]() mutable {
      op.callBoxed(arguments);
      size_t next = 0;
      for (const c10::IValue& value : arguments) {
        convert_tensors(value, [&](const at::Tensor& tensor) { return destinations[next++].copy_(tensor); });
      }
    });
    replace_arguments(results);
    return true;
  }

  void run_now() {
    if (device_) wait_for_current_stream(*device_);
    Stack values = aliased_;
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      op_.callBoxed(values);
    }
    for (auto& [npu, cpu] : aliases_) write_back(npu, cpu);
    Stack results;
    for (const c10::IValue& value : values) {
      results.push_back(convert_tensors(value, [this](const at::Tensor& tensor) { return to_npu(tensor); }));
    }
    replace_arguments(results);
    if (device_) launch(*device_, full_name(op_), {}, [] {});  // so that it is counted, and delayed, as a kernel
  }

  // The operator may have resized its `out` arguments.
  static void write_back(at::Tensor& npu, const at::Tensor& cpu) {
    if (npu.sizes() == cpu.sizes() && (!cpu.numel() || npu.data_ptr() == cpu.data_ptr())) return;
    npu.resize_(cpu.sizes());
    if (cpu.numel()) on_cpu(npu).copy_(cpu);
  }

  at::Tensor to_npu(const at::Tensor& tensor) {
    if (!tensor.defined() || is_npu(tensor) || !device_) return tensor;
    for (const auto& [npu, cpu] : aliases_) {
      if (cpu.is_same(tensor)) return npu;
    }
    const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
    at::Tensor copy = to_npu_like(dense, *device_);
    if (dense.numel()) on_cpu(copy).copy_(dense);
    return copy;
  }

  void replace_arguments(const Stack& results) {
    torch::jit::drop(*stack_, size_);
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  const size_t size_, first_;
  Stack aliased_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // of the NPU, on the CPU
  std::optional<c10::Device> device_;
};

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

}  // namespace

int64_t replace_aten_kernels(const std::vector<std::string>& kept) {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  const std::set<std::string> keep(kept.begin(), kept.end());
  const std::string aten = "aten::";
  auto& dispatcher = c10::Dispatcher::singleton();
  int64_t replaced = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.compare(0, aten.size(), aten) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) || returns_view(op->schema())) continue;
    const std::string base = name.name.substr(aten.size());
    const std::string full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (keep.count(base) || keep.count(full) || base.find("npu_") != std::string::npos) continue;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    replaced++;
  }
  return replaced;
}

}  // namespace cann_on_host
