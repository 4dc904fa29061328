"""Stand-ins for the vendors' libraries, so that a machine without a device loads MindSpore's Ascend and GPU plugins.

The ordinary wheel carries both plugins; what is missing are CANN's and CUDA's libraries, of which the plugins use a few
hundred symbols. Each is defined here as a function that returns 0, except for those whose answer matters before any
kernel runs. Graphs are compiled with them; nothing computes.
"""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Optional

VERSION = "2.10.0"
SYSTEM = [Path("/lib/x86_64-linux-gnu"), Path("/usr/lib/x86_64-linux-gnu"), Path("/lib64")]
TOOLS = ("g++", "nm", "readelf", "strings")

# What CANN must answer: memory, the number of the device, and where error codes register when the plugin is loaded.
ASCEND = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
namespace ge {
class StatusFactory {
 public:
  static StatusFactory *Instance();
  std::map<uint32_t, std::string> texts;
  std::mutex mutex;
  char rest[256];
};
EXPORT StatusFactory *StatusFactory::Instance() {
  static StatusFactory factory;
  return &factory;
}
}  // namespace ge
extern "C" {
EXPORT int aclrtMalloc(void **p, size_t n, int) { return (*p = calloc(1, n + 1)) == nullptr; }
EXPORT int aclrtMallocHost(void **p, size_t n) { return (*p = calloc(1, n + 1)) == nullptr; }
EXPORT int aclrtFree(void *p) { free(p); return 0; }
EXPORT int aclrtFreeHost(void *p) { free(p); return 0; }
EXPORT int aclrtGetDevice(int *device) { *device = 0; return 0; }
EXPORT int aclrtMemcpy(void *to, size_t, const void *from, size_t n, int) { memcpy(to, from, n); return 0; }
EXPORT int aclrtMemcpyAsync(void *to, size_t, const void *from, size_t n, int, void *) {
  memcpy(to, from, n);
  return 0;
}
EXPORT int aclrtMemset(void *to, size_t, int value, size_t n) { memset(to, value, n); return 0; }
}
"""

# What CUDA must answer: memory, handles, and the properties of a device of compute capability 8.0 (cudaDeviceProp of
# CUDA 11, in which no count may be 0).
GPU = r"""
#include <cstdlib>
#include <cstring>
static int Handle(void **p) { return (*p = calloc(1, 4096)) == nullptr; }
extern "C" {
EXPORT int cudaMalloc(void **p, size_t n) { return (*p = calloc(1, n + 1)) == nullptr; }
EXPORT int cudaHostAlloc(void **p, size_t n, unsigned) { return (*p = calloc(1, n + 1)) == nullptr; }
EXPORT int cudaFree(void *p) { free(p); return 0; }
EXPORT int cudaFreeHost(void *p) { free(p); return 0; }
EXPORT int cudaMemcpy(void *to, const void *from, size_t n, int) { memcpy(to, from, n); return 0; }
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t n, int, void *) { memcpy(to, from, n); return 0; }
EXPORT int cudaMemset(void *to, int value, size_t n) { memset(to, value, n); return 0; }
EXPORT int cudaMemsetAsync(void *to, int value, size_t n, void *) { memset(to, value, n); return 0; }
EXPORT int cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = size_t{8} << 30; return 0; }
EXPORT int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
EXPORT int cudaGetDeviceProperties(char *properties, int) {
  memset(properties, 0, 728);
  strcpy(properties, "stand-in");
  const auto set = [properties](int place, int value) { memcpy(properties + place, &value, sizeof(value)); };
  for (int place = 292; place < 728; place += 4) set(place, 80);
  const size_t sizes[] = {size_t{8} << 30, 49152};  // bytes of memory, bytes shared by a block
  memcpy(properties + 288, sizes, sizeof(sizes));
  const int limits[] = {65536, 32, 80, 80, 1024, 1024, 1024, 64, 2147483647, 65535, 65535};
  memcpy(properties + 304, limits, sizeof(limits));
  set(360, 8);
  set(364, 0);
  return 0;
}
EXPORT int cudaStreamCreate(void **p) { return Handle(p); }
EXPORT int cudaStreamCreateWithFlags(void **p, unsigned) { return Handle(p); }
EXPORT int cudaStreamCreateWithPriority(void **p, unsigned, int) { return Handle(p); }
EXPORT int cudaEventCreate(void **p) { return Handle(p); }
EXPORT int cudaEventCreateWithFlags(void **p, unsigned) { return Handle(p); }
EXPORT const char *cudaGetErrorString(int) { return "stand-in"; }
EXPORT const char *cudaGetErrorName(int) { return "stand-in"; }
EXPORT const char *cudnnGetErrorString(int) { return "stand-in"; }
EXPORT int cublasCreate_v2(void **p) { return Handle(p); }
EXPORT int cusolverDnCreate(void **p) { return Handle(p); }
EXPORT int cusparseCreate(void **p) { return Handle(p); }
EXPORT int curandCreateGenerator(void **p, int) { return Handle(p); }
EXPORT int cufftCreate(int *plan) { *plan = 1; return 0; }
EXPORT int nvrtcVersion(int *major, int *minor) { *major = 11; *minor = 6; return 0; }
EXPORT void **__cudaRegisterFatBinary(void *) { static void *binaries[64]; return binaries; }
EXPORT int cudnnCreate(void **p) { return Handle(p); }
#define DESCRIPTOR(name) EXPORT int cudnnCreate##name##Descriptor(void **p) { return Handle(p); }
DESCRIPTOR(Activation) DESCRIPTOR(Convolution) DESCRIPTOR(Dropout) DESCRIPTOR(Filter) DESCRIPTOR(LRN)
DESCRIPTOR(OpTensor) DESCRIPTOR(Pooling) DESCRIPTOR(RNN) DESCRIPTOR(ReduceTensor) DESCRIPTOR(Tensor)
}
"""
# Libraries that the Ascend plugin opens by name, and whose functions it asks for by name.
OPENED = ["libascendcl.so", "libmsprofiler.so", "libacl_op_compiler.so", "libacl_tdt_channel.so", "libacl_tdt_queue.so"]
OPENED += ["driver/libascend_hal.so"]


def mindspore_libraries() -> Path:
    """Return the folder of MindSpore's libraries, without importing it."""
    spec = find_spec("mindspore")
    return Path(spec.submodule_search_locations[0]) / "lib"


def why_not() -> Optional[str]:
    """Return why stand-ins can't be built here, None if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install g++ and binutils"
    version = (mindspore_libraries().parent / "version.py").read_text(encoding="utf-8")
    if f"'{VERSION}'" not in version:
        return f"written for the plugins of MindSpore {VERSION}"
    return None


def build(folder: Path) -> None:
    """Build the stand-ins of both devices into `folder`, some fifteen seconds."""
    libraries = mindspore_libraries()
    plugin = libraries / "plugin"
    ascend = [libraries, plugin, *(path for path in (plugin / "ascend").rglob("*") if path.is_dir()), plugin / "ascend"]
    target = folder / "ascend/latest/lib64"
    vendor = Vendor(target, ascend, [plugin / "libmindspore_ascend.so.2"])
    callers = (plugin / "ascend/libmindspore_ascend_res_manager.so", plugin / "libmindspore_ops_ascend.so")
    texts = "".join(_output("strings", "-a", path) for path in callers).splitlines()
    vendor.build(ASCEND, {text for text in texts if re.fullmatch(r"acl(?!nn)\w+", text)}, OPENED)
    (folder / "ascend/latest/opp").mkdir()
    hccl = folder / "ascend/python/hccl"
    hccl.mkdir(parents=True)
    (hccl / "__init__.py").touch()
    (hccl / "sys_version.py").write_text('__sys_version__ = "1.0.0"\n', encoding="utf-8")

    gpu = [libraries, plugin, plugin / "gpu", plugin / "gpu11.6", plugin / "cpu"]
    starts = [plugin / "libmindspore_gpu.so.11.6", plugin / "gpu/libcuda_ops.so.11"]
    Vendor(folder / "gpu/lib", gpu, starts).build(GPU, set(), [])
    compiler = folder / "gpu/cuda/bin/nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text('#!/bin/sh\necho "Cuda compilation tools, release 11.6, V11.6.55"\n', encoding="utf-8")
    compiler.chmod(0o755)


def environment(folder: Path, device: str, ranks: int = 1) -> dict[str, str]:
    """Return the environment in which Python compiles for `device`, "Ascend" (a dry run) or "GPU"."""
    libraries = mindspore_libraries()
    plugin = libraries / "plugin"
    if device == "GPU":
        paths = [folder / "gpu/lib", libraries, plugin, plugin / "gpu", plugin / "gpu11.6"]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, paths)), "CUDA_HOME": str(folder / "gpu/cuda")}
    paths = [folder / "ascend/latest/lib64", libraries, plugin, plugin / "ascend"]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(map(str, paths)),
        "ASCEND_OPP_PATH": str(folder / "ascend/latest/opp"),
        "PYTHONPATH": os.pathsep.join([str(folder / "ascend/python"), os.environ.get("PYTHONPATH", "")]),
        "MS_SIMULATION_LEVEL": "0",
        "RANK_SIZE": str(ranks),
        "RANK_ID": "0",
    }


class Vendor:
    """The libraries of one vendor: one with all symbols, and an empty one of each name, which needs it.

    Args:
        target: the folder to build into.
        folders: where MindSpore's libraries of this device are.
        starts: the libraries that MindSpore loads first.
    """

    def __init__(self, target: Path, folders: list[Path], starts: list[Path]):
        self.target = target
        have = {
            path.name: path for folder in [*SYSTEM, *reversed(folders)] if folder.is_dir() for path in folder.iterdir()
        }
        self.libraries: list[Path] = []
        self.missing: set[str] = set()
        todo = list(starts)
        while todo:
            library = todo.pop()
            if library in self.libraries:
                continue
            self.libraries.append(library)
            for name in re.findall(r"NEEDED.*\[(.*?)\]", _output("readelf", "-d", library)):
                if name in have:
                    todo.append(have[name])
                else:
                    self.missing.add(name)

    def build(self, answers: str, named: set[str], opened: list[str]) -> None:
        """Write `answers` and a zero for every other symbol, `named` ones included; then one library for each name."""
        self.target.mkdir(parents=True)
        source = self.target / "answers.cc"
        source.write_text('#define EXPORT __attribute__((visibility("default")))\n' + answers, encoding="utf-8")
        vendor = self.target / "libvendor.so"
        _link(vendor, source)
        answered = _symbols(vendor, "--defined-only")
        zeros = self.target / "zeros.S"
        zeros.write_text(_assembly((self.undefined() | named) - set(answered)), encoding="utf-8")
        _link(vendor, source, zeros)
        versions = self.target / "versions"
        for name in [*self.missing, *opened]:
            # A library whose symbols carry versions calls the version like itself.
            versions.write_text(f"{Path(name).name} {{ global: *; }};\n", encoding="utf-8")
            (self.target / name).parent.mkdir(exist_ok=True)
            _link(
                self.target / name,
                f"-Wl,--version-script={versions}",
                "-x",
                "c++",
                "/dev/null",
                f"-L{self.target}",
                "-lvendor",
            )

    def undefined(self) -> set[str]:
        """Return the symbols that the libraries use and none of them defines, but Python's."""
        wanted: set[str] = set()
        defined: set[str] = set()
        for library in self.libraries:
            wanted.update(name for name, kind in _symbols(library, "--undefined-only").items() if kind != "w")
            defined.update(_symbols(library, "--defined-only"))
        return {name for name in wanted - defined if not name.startswith(("Py", "_Py"))}


def _assembly(names: set[str]) -> str:
    """Return functions that return 0, and zeros for the tables of C++ classes."""
    lines = ['.section .note.GNU-stack,"",@progbits', ".text"]
    tables = {name for name in names if re.match(r"_ZT[VIS]", name)}
    for name in sorted(names - tables):
        lines += [f".globl {name}", f".type {name},@function", f"{name}:", " xor %eax,%eax", " xor %edx,%edx", " ret"]
    lines += [".data", ".balign 16"]
    for name in sorted(tables):
        lines += [f".globl {name}", f".type {name},@object", f".size {name},512", f"{name}: .zero 512"]
    return "\n".join(lines) + "\n"


def _symbols(library: Path, which: str) -> dict[str, str]:
    """Return the dynamic symbols of a library, without their versions, and their kinds."""
    rows = [line.split()[-2:] for line in _output("nm", "-D", which, library).splitlines() if len(line.split()) > 1]
    return {name.split("@")[0]: kind for kind, name in rows}


def _link(out: Path, *inputs: object) -> None:
    flags = ["-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0", "-O1", "-fPIC", "-fvisibility=hidden", "-shared"]
    flags += [f"-Wl,-soname,{out.name}", "-Wl,-rpath,$ORIGIN:$ORIGIN/..", "-Wl,--no-as-needed"]
    subprocess.run(["g++", *flags, "-o", str(out), *map(str, inputs)], check=True)


def _output(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
    return done.stdout
