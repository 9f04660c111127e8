"""The empty CUDA runtime: what is read off its log, the Triton IR and binaries (exact); and, where torch is a CUDA build, itself (slow)."""

from __future__ import annotations

import json

import pytest
import torch

from tests.gpu_dry_run import binaries, log, runtime
from tests.gpu_dry_run.accesses import accesses

TTIR = """
module {
  tt.func public @kernel(%x: !tt.ptr<bf16> loc("x"(#loc)), %x_0: i32 loc("x"(#loc)), %out: !tt.ptr<i8>, %out_1: !tt.ptr<f32>,
      %state: !tt.ptr<i32>, %state_2: !tt.ptr<f32>) attributes {noinline = false} {
    %0 = tt.splat %x : !tt.ptr<bf16> -> tensor<64x!tt.ptr<bf16>>
    %1 = tt.addptr %0, %2 : tensor<64x!tt.ptr<bf16>>, tensor<64xi64>
    %3 = tt.load %1, %mask : tensor<64x!tt.ptr<bf16>>
    %4 = tt.atomic_rmw max, relaxed, gpu, %state, %5, %true : (!tt.ptr<i32>, i32, i1) -> i32
    %6 = tt.load %state_2 : !tt.ptr<f32>
    %7 = scf.for %i = %a to %b step %c iter_args(%p = %out) -> (!tt.ptr<i8>) : i32 {
      tt.store %p, %3 : !tt.ptr<i8>
      %8 = tt.addptr %p, %c64 : !tt.ptr<i8>, i32
      scf.yield %8 : !tt.ptr<i8>
    }
    scf.if %9 {
      tt.store %out_1, %6 : !tt.ptr<f32>
    }
    tt.return
  }
}
"""
SASS = """
		Function : kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;        /* 0x1 */
        /*0010*/               @P0 BRA 0x0030 ;                  /* 0x1 */
        /*0020*/                   CALL.REL.NOINC 0x60 ;         /* 0x1 */
        /*0030*/              @!P1 EXIT ;                        /* 0x1 */
        /*0040*/               @P0 STG.E desc[UR4][R2.64], R4 ;  /* 0x1 */
        /*0050*/                   EXIT ;                        /* 0x1 */
        /*0060*/                   MUFU.RCP R0, R1 ;             /* 0x1 */
        /*0070*/                   RET.REL.NODEC R4 0x0 ;        /* 0x1 */
        /*0080*/                   BRA 0x80;                     /* 0x1 */
        /*0090*/                   NOP;                          /* 0x1 */
"""


def test_accesses_are_followed_through_loops_and_told_apart_under_conditions():
    """Pointers in their order, those of one tuple by numbered names: so they meet the tensors of a launch."""
    found = accesses(TTIR)
    assert found == {"x": "r", "out": "w", "out_1": "W", "state": "rw", "state_2": "r"}
    assert list(found) == ["x", "out", "out_1", "state", "state_2"]


def test_what_two_loops_load_is_read_twice():
    """A largest magnitude, then a cast: as in two launches. Two loads of one loop, its inner loops included, are one."""
    loop = "scf.for %i = %a to %b step %c : i32 {"
    load = "%3 = tt.load %1, %mask : tensor<64x!tt.ptr<bf16>>"
    before, after = TTIR.split(f"    {load}\n")
    assert accesses("\n".join([before, loop, load, "}", loop, load, "}", after]))["x"] == "rr"
    assert accesses("\n".join([before, loop, load, loop, load, "}", "}", load, after]))["x"] == "r"
    assert (
        accesses("\n".join([before, loop, load, "}", "scf.if %9 {", loop, load, "}", "}", after]))[
            "x"
        ]
        == "r"
    )


def test_names_are_used_again_in_regions_side_by_side():
    """As Triton's IR prints them: the pointers of one loop are not those of the next."""
    loops = [
        f"scf.for %i = %a to %b step %c : i32 {{\n%20 = tt.addptr %{name}, %2 : !tt.ptr<f32>\n{access}\n}}"
        for name, access in (
            ("out", "tt.store %20, %3 : !tt.ptr<i8>"),
            ("state", "%21 = tt.load %20 : !tt.ptr<i32>"),
        )
    ]
    found = accesses(TTIR.replace("    tt.return", "\n".join([*loops, "tt.return"])))
    assert (found["out"], found["state"]) == ("w", "rw")


def test_instructions_leave_out_slow_paths_and_filling():
    assert binaries.instructions(SASS) == 6
    assert binaries.instructions(SASS.replace("CALL.REL.NOINC 0x60", "IADD3 R4, R4, R5, RZ")) == 9


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "programs"),
    [(76, 256, 0, 3), (48, 256, 0, 5), (178, 256, 0, 1), (128, 256, 0, 2), (32, 256, 0, 8), (32, 32, 0, 32), (16, 128, 65536, 3)],
)  # fmt: skip
def test_programs_fit_by_registers_warps_and_shared_memory(registers, threads, shared, programs):
    """NVIDIA's occupancy calculator for compute capability 9.0."""
    assert binaries.programs(registers, threads, shared) == programs


def test_the_log_is_summed():
    """A captured launch counts when its graph is launched; bytes of tensors that are not known are said."""
    launch = {
        "e": "launch",
        "name": "cast",
        "grid": [8, 1, 1],
        "block": [256, 1, 1],
        "shared": 64,
        "cubin": "a.cubin",
    }
    span = {
        "e": "bytes",
        "name": "cast",
        "read": 10,
        "written": 5,
        "conditional": 2,
        "spanned": 17,
        "piece": 4096,
    }
    product = {
        "e": "gemm", "m": 2, "n": 3, "k": 5, "batch": 1, "trans": "TN", "a": "e4m3", "b": "e4m3", "c": "bf16", "scale_a": "tensor",
        "scale_b": "row", "fast": 1, "call": "cublasLtMatmul", "workspace": 1 << 20, "captured": False,
    }  # fmt: skip
    seen = log.summed([
        span | {"unknown": 0}, launch | {"captured": False}, span | {"unknown": 1}, launch | {"captured": True}, product,
        {"e": "graph_launch", "launches": 7}, {"e": "memcpy", "kind": "host to device", "bytes": 3}, {"e": "sync", "what": "stream"},
        {"e": "unknown", "name": "cudaNew"}, {"e": "mark", "name": "here"},
    ])  # fmt: skip
    assert seen.launches == 1 + 1 + 7 and seen.captured == 1 and seen.product_flop == 60
    assert (seen.total("read"), seen.total("written"), seen.total("spanned")) == (20, 10, 34)
    assert seen.kernels["cast"].binaries == {log.Binary("a.cubin", 256, 64, 4096): 2}
    assert seen.memcpys == {"host to device": [1, 3]} and seen.waits == {"stream": 1}
    assert set(seen.remarks) == {
        "unknown: cudaNew",
        "bytes of cast: 1 of its tensors are not known",
    }
    assert list(seen.products) == [
        "2x3x5 TN e4m3*e4m3->bf16 scales tensor*row, fast accumulation workspace 1 MiB cublasLtMatmul"
    ]


def test_a_cut_line_is_left_out(tmp_path):
    path = tmp_path / "events-1.jsonl"
    path.write_text(json.dumps({"e": "memset"}) + '\n{"e": "me')
    assert list(log.read(path)) == [{"e": "memset"}]


def test_why_nothing_can_be_counted_is_said(monkeypatch):
    monkeypatch.setattr(runtime.platform, "system", lambda: "Linux")
    monkeypatch.setattr(runtime.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is no CUDA build; `make dry-run` installs one" in runtime.refusal()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    assert "triton" in runtime.refusal()
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(runtime.shutil, "which", lambda name: None)
    assert "no gcc" in runtime.refusal()
    monkeypatch.setattr(runtime.platform, "machine", lambda: "arm64")
    assert "for Linux on x86-64" in runtime.refusal()


@pytest.mark.slow
@pytest.mark.skipif(runtime.refusal() != "", reason=runtime.refusal() or "can be counted here")
def test_the_runtime_itself(tmp_path):
    """`checks`, in a process over it."""
    done = runtime.python(["-m", "tests.gpu_dry_run.checks"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels within compiled code are counted" in done.stdout
