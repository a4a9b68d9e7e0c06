"""Plans with operators of CUDA, without a GPU: python -m tests.fake_cuda [ROW ..].

Needs PyTorch's CUDA build and gcc, and no driver. Rows of the zoo are planned with
tensors that only claim to be on a GPU; a plan must have no value on the CPU but credits
of 0 bytes. Without a driver, autograd asks whether each GPU is in use and fails; two
small libraries, which are made in a temporary folder and loaded first, answer that none
is, and that kernels are chosen for an H100. What asks a GPU even to be traced, such as
cuDNN's LSTM, can't be planned here. Ends with 1 if a plan has a value on the CPU, or
for anything but a plan or a refusal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import fxsched
from fxsched.ir.meta import of_call

ROWS = (
    *("mlp", "conv_2d", "batch_norm_2d", "multihead_attention", "lstm", "embedding"),
    *("tied", "several_encoders", "siamese", "scaled_dot_product", "autocast"),
    *("llama", "gpt2", "qwen3", "mixtral", "bert", "modernbert", "t5", "vit", "swin"),
    *("resnet", "whisper", "clip", "llava"),
)
ASKED = "FXSCHED_FAKE_CUDA"  # set in the process that has the libraries
ANSWERS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <string.h>
/* c10::cuda::device_count(): some, where libtorch_cuda checks a number; else none. */
signed char _ZN3c104cuda12device_countEv(void) {
  Dl_info info;
  void *caller = __builtin_return_address(0);
  return dladdr(caller, &info) && info.dli_fname &&
         strstr(info.dli_fname, "libtorch_cuda") ? 127 : 0;
}
/* at::cuda::getCurrentDeviceProperties(), by which attention chooses its kernel */
static struct cudaDeviceProp h100 = {.major = 9, .multiProcessorCount = 132};
struct cudaDeviceProp *_ZN2at4cuda26getCurrentDevicePropertiesEv(void) {
  return &h100;
}
struct cudaDeviceProp *_ZN2at4cuda19getDevicePropertiesEa(signed char device) {
  return &h100;
}
"""


DEFINES = "\n".join(  # what headers that come with PyTorch want, and is not among them
    f"#define {name}"
    for name in (
        *("__device_builtin__", "__device_builtin_texture_type__", "CUDARTAPI"),
        *("__device_builtin_surface_type__", "__host__", "__device__"),
        "__builtin_align__(size) __attribute__((aligned(size)))",
        "__align__(size) __attribute__((aligned(size)))",
    )
)


def start_again() -> int:
    """Runs this file in a process that loads the libraries first."""
    where = Path(torch.__file__).parent / "lib"
    symbols = subprocess.run(
        ["nm", "-D", str(where / "libcaffe2_nvrtc.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    driver = "int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active)"
    source = [f"{driver} {{ *flags = 0; *active = 0; return 0; }}"]
    for name in symbols:
        if name[:2] == "cu" and name[2:3].isupper() and name not in driver:
            source.append(f"int {name}(void) {{ return 100; }}  /* no device */")
    with tempfile.TemporaryDirectory() as folder:
        _compiled(folder, "answers.so", ANSWERS)
        _compiled(folder, "libcuda.so.1", "\n".join(source))
        environment = {
            "LD_PRELOAD": f"{folder}/answers.so",
            "LD_LIBRARY_PATH": folder,
            ASKED: "1",
        }
        command = [sys.executable, "-m", "tests.fake_cuda", *sys.argv[1:]]
        return subprocess.run(command, env=os.environ | environment).returncode


def _compiled(folder: str, name: str, text: str) -> None:
    Path(folder, "source.c").write_text(text)
    Path(folder, "crt").mkdir(exist_ok=True)
    Path(folder, "crt", "host_defines.h").write_text(DEFINES)
    command = ["gcc", "-shared", "-fPIC", "-O0", f"-Wl,-soname,{name}", "-o", name]
    packages = Path(torch.__file__).parents[1]
    headers = ["-I.", *(f"-I{each}" for each in packages.glob("nvidia/*/include"))]
    subprocess.run([*command, *headers, "source.c", "-ldl"], cwd=folder, check=True)


def on_gpu(mode: FakeTensorMode, value: Any) -> Any:
    """A tensor that claims to be on a GPU."""
    if not isinstance(value, Tensor):
        return value
    with mode:
        like = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="cuda"
        )
    return like.requires_grad_(value.requires_grad)


def move(mode: FakeTensorMode, model: torch.nn.Module) -> None:
    """Puts parameters and buffers of a model there; shared ones stay shared."""
    seen: dict[Tensor, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is not None and value not in seen:
                    new = on_gpu(mode, value)
                    if isinstance(value, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, value.requires_grad)
                    seen[value] = new
                held[name] = seen.get(value) if value is not None else None


def planned(name: str) -> str:
    """How a row is planned: "CUDA", "refused: ..", or what is wrong."""
    from .zoo import cases
    from .zoo.compare import OWN, schedule_of

    torch.manual_seed(0)
    torch._dynamo.reset()
    case, mode = cases.all_cases()[name], FakeTensorMode()
    model, inputs = case.make()
    for module in model.modules():  # else traces compute a constant, on a real GPU
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    move(mode, model)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    args, kwargs = pytree.tree_map(lambda each: on_gpu(mode, each), (args, kwargs))
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=case.autocast):
            plan = fxsched.plan(
                model, schedule_of(case, OWN), *args, **kwargs, **case.options
            )
    except fxsched.PlanError as error:
        return f"refused: {error}"
    found = on_host(plan)
    return f"on the CPU: {', '.join(sorted(found)[:4])}" if found else "CUDA"


def on_host(plan: fxsched.Plan) -> set[str]:
    """Values of programs, and operators of stages, that are on the CPU."""
    found = set[str]()
    for program in plan.programs:
        for node in program.graph.nodes:
            for spec in of_call(node).get("specs", ()):
                if spec.device.type == "cpu" and spec.bytes:
                    found.add(f"{node}")
        for _, stage in fxsched.passes.stage_graphs(program):
            for node in stage.graph.nodes:
                value = node.meta.get("val")
                for each in pytree.tree_leaves(value):
                    if isinstance(each, Tensor) and each.device.type == "cpu":
                        found.add(f"{node} of a stage")
    return found


def main() -> int:
    """Prints how each row is planned."""
    if not os.environ.get(ASKED):
        if not torch.backends.cuda.is_built():
            print("needs PyTorch's CUDA build")
            return 0
        return start_again()
    torch.cuda._lazy_init = lambda: None  # type: ignore[attr-defined]
    counts: Counter[str] = Counter()
    for name in sys.argv[1:] or ROWS:
        try:
            said = planned(name)
        except Exception as error:
            said = f"{type(error).__name__}: {str(error)[:300]}"
        counts[said.partition(":")[0]] += 1
        print(f"{name}: {said}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(not {"CUDA", "refused"}.issuperset(counts))


if __name__ == "__main__":
    sys.exit(main())
