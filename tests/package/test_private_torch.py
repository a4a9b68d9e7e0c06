"""The private names of PyTorch that fxsched uses: what a new version must still have.

Where one is gone, the file of fxsched that uses it is what has to change.
"""

from __future__ import annotations

import importlib
import inspect
from functools import reduce

import pytest
import torch
from torch import fx

import fxsched
from fxsched.ir.model_lines import LINES, line_in_model
from tests import cases

NAMES = {
    "frames.py": (
        "torch._dynamo.convert_frame:_compile",
        "torch._dynamo.eval_frame:cached_backends",
        "torch._dynamo.config:recompile_limit",
        "torch._dynamo.config:accumulated_recompile_limit",
        "torch._dynamo.config:fail_on_recompile_limit_hit",
        "torch._dynamo.config:specialize_float",
        "torch._dynamo.config:allow_rnn",
        "torch._dynamo.config:patch",
        "torch.fx.experimental._config:use_duck_shape",
    ),
    "compiled_modules.py": (
        "torch._dynamo:OptimizedModule.__call__",
        "torch._C:_len_torch_dispatch_stack",
        "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    ),
    "own_gradients.py": (
        "torch.autograd:Function.apply",
        "torch.autograd.graph:saved_tensors_hooks.__enter__",
    ),
    "dynamo.py": (
        "torch._dynamo:maybe_mark_dynamic",
        "torch._dynamo.exc:Unsupported",
        "torch._dynamo.symbolic_convert:InstructionTranslator.current_tx",
    ),
    "lowered.py": (
        "torch._C._autograd:_get_data_attr",
        "torch.fx.experimental.proxy_tensor:get_proxy_mode",
        "torch.fx.experimental.proxy_tensor:track_tensor_tree",
        "torch.ops:higher_order.wrap_with_set_grad_enabled",
        "torch.ops:higher_order.wrap_with_autocast",
        "torch.amp.autocast_mode:_enter_autocast",
        "torch.amp.autocast_mode:_exit_autocast",
    ),
    "device_graphs.py": (
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch.cuda:CUDAGraph.capture_begin",
        "torch:_foreach_copy_",
    ),
    "profiler_ranges.py": ("torch.autograd.profiler:_is_profiler_enabled",),
    "wrappers.py": (
        "torch.nn.parallel:DistributedDataParallel._get_active_ddp_module",
    ),
    "ctc_losses.py": (
        "torch._subclasses.fake_impls:register_op_impl",
        "torch._subclasses.fake_impls:op_implementations_dict",
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
        "torch.ops:aten._ctc_loss.Tensor",
    ),
    "microbatch.py": ("torch._subclasses:FakeTensorMode",),
    "autograd.py": (
        "torch._functorch.aot_autograd:aot_export_joint_with_descriptors",
        "torch._functorch.partitioners:default_partition",
        "torch._functorch._aot_autograd.descriptors:GradAOTOutput",
        "torch._functorch._aot_autograd.descriptors:InputMutationAOTOutput",
        "torch._functorch._aot_autograd.descriptors:PlainAOTInput",
        "torch._functorch._aot_autograd.descriptors:PlainAOTOutput",
        "torch._functorch._aot_autograd.descriptors:TangentAOTInput",
        "torch._guards:TracingContext",
        "torch._guards:tracing",
        "torch.backends.mkldnn:enabled",
    ),
    "graphs.py": ("torch._C:_set_grad_enabled",),
    "rank_gradients.py": ("torch._C:DisableTorchFunctionSubclass",),
    "autograd_call.py": (
        "torch.autograd:Variable._execution_engine.queue_callback",
        "torch:Tensor._backward_hooks",
        "torch:Tensor._post_accumulate_grad_hooks",
    ),
    "inductor.py": (
        "torch._inductor.compile_fx:compile_fx",
        "torch.fx.experimental.symbolic_shapes:ShapeEnv",
    ),
    "recording.py": (
        "torch:_C.DisableTorchFunction",
        "torch.multiprocessing.reductions:StorageWeakRef.expired",
        "torch:UntypedStorage._new_with_weak_ptr",
        "torch:UntypedStorage._cdata",
        "torch.utils._python_dispatch:TorchDispatchMode",
    ),
    "tracebacks.py": ("torch._dynamo.exc:InternalTorchDynamoError",),
    "scalers.py": ("torch.amp:GradScaler._unscale_grads_",),
    "clipping.py": (
        "torch.nn.utils.clip_grad:_clip_grads_with_norm_",
        "torch.nn.utils.clip_grad:_get_total_norm",
        "torch.nn.utils.clip_grad:clip_grad_value_",
    ),
    "averages.py": (
        "torch.optim.swa_utils:AveragedModel.__init__",
        "torch.optim.swa_utils:AveragedModel.update_parameters",
    ),
    "names.py": (
        "torch._C:_set_grad_enabled",
        "torch._ops:HigherOrderOperator",
    ),
    "graph_files.py": ("torch._subclasses:FakeTensorMode",),
    "lazy.py": (
        "torch.fx._lazy_graph_module:_use_lazy_graph_module",
        "torch.fx._lazy_graph_module:_LazyGraphModule",
    ),
}


@pytest.mark.parametrize("file", NAMES)
def test_private_names_are_there(file: str) -> None:
    for each in NAMES[file]:
        module, _, name = each.partition(":")
        reduce(getattr, name.split("."), importlib.import_module(module))


def test_dynamo_compiles_a_frame_with_what_the_wrapper_reads() -> None:
    from torch._dynamo import convert_frame

    compile_frame = inspect.unwrap(convert_frame._compile)
    assert {"compiler_fn", "locals"} <= set(inspect.signature(compile_frame).parameters)
    assert "real_stack" in inspect.getsource(torch._dynamo.exc.Unsupported.__init__)


@pytest.mark.slow
def test_custom_meta_goes_on_to_the_backward() -> None:
    model, inputs = cases.build("gpt")
    plan = fxsched.plan(model, fxsched.schedules.gpipe(1, 2), *inputs)
    stage = plan.programs[0].get_submodule("backward_0")
    assert isinstance(stage, fx.GraphModule)
    flat = stage.get_submodule("flat_backward")
    assert isinstance(flat, fx.GraphModule)
    calls = flat.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    lines = [line_in_model(node, stage.meta[LINES]) for node in calls]
    modules = {line.module for line in lines if line is not None}
    assert None not in lines
    assert {"head", "blocks.1.attention.key"} <= modules
