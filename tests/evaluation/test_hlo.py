"""What is read of an optimised program's text: cycles, messages and copies of a turn of its loop."""

from __future__ import annotations

from eval.lib.hlo import ProgramText

TEXT = """HloModule jit_run_decode, is_scheduled=true

%drafting (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  %step.1 = f32[4]{0} fusion(%p), calls=%f, metadata={op_name="jit(run)/while/body/draft/while/body/dot"}, backend_config={"estimated_cycles":"10"}
  ROOT %all-reduce.1 = f32[4]{0} all-reduce(%step.1), metadata={op_name="jit(run)/while/body/draft/while/body/sum"}
}

%until (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]) parameter(0)
  %constant.4 = s32[]{:T(128)} constant(4)
  ROOT %lt = pred[] compare(%p, %constant.4), direction=LT
}

%drawn (p: f32[4]) -> f32[4] {
  ROOT %sort.1 = f32[4]{0} sort(%p), metadata={op_name="jit(run)/while/body/verify/cond/sort"}, backend_config={"estimated_cycles":"900"}
}

%best (p: f32[4]) -> f32[4] {
  ROOT %max.1 = f32[4]{0} fusion(%p), calls=%g, metadata={op_name="jit(run)/while/body/verify/cond/max"}, backend_config={"estimated_cycles":"7"}
}

%block (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %while.2 = (s32[], f32[4]) while(%p), condition=%until, body=%drafting, metadata={op_name="jit(run)/while/body/draft/while"}
  %copy.1 = bf16[2,8]{1,0} copy(%x), metadata={op_name="jit(run)/while/body/extend/transpose"}, backend_config={"estimated_cycles":"3"}
  ROOT %conditional.1 = f32[4]{0} conditional(%y, %x), branch_computations={%drawn, %best}, metadata={op_name="jit(run)/while/body/verify/cond"}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %copy.2 = f32[16,4]{0,1} copy(%p)
  %copy.3 = f32[16,4]{0,1:T(8)S(1)} copy(%p)
  %while.1 = (s32[], f32[4]) while(%p), condition=%forever, body=%block
  ROOT %copy.4 = s8[5]{0} copy(%while.1)
}
"""  # noqa: E501


def test_loops_count_as_often_as_they_turn_and_conditions_as_greedy_decoding_takes_them() -> None:
    block = ProgramText(TEXT).block()
    assert +block.cycles == {"draft": 4 * 10, "extend": 3, "verify": 7}
    assert +block.collectives == {"draft": 4}
    assert block.copied.total() == 2 * 8 * 2


FUSED = """HloModule jit_run_decode, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  ROOT %all-reduce.1 = f32[8]{0} all-reduce(%p), to_apply=%add
}

%squared (p: f32[8]) -> f32[8] {
  ROOT %multiply.1 = f32[8]{0} multiply(%p, %p)
}

%block (p: f32[8]) -> f32[8] {
  %fusion.1 = f32[8]{0} fusion(%p), kind=kLoop, calls=%squared
  %fusion-start = ((f32[8]{0}), f32[8]{0}) fusion-start(%fusion.1), kind=kCustom, calls=%fused
  %fusion-done = f32[8]{0} fusion-done(%fusion-start)
  ROOT %bitcast.1 = f32[8]{0} bitcast(%fusion-done)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  ROOT %while.1 = f32[8] while(%p), condition=%forever, body=%block
}
"""


def test_messages_that_gpus_wrap_in_fusions_count() -> None:
    block = ProgramText(FUSED).block()
    assert block.collectives.total() == 1
    assert block.kernels.total() == 2
    assert block.sent.total() == 8 * 4


def test_of_two_loops_that_which_drafts_is_the_block() -> None:
    plain = "".join(f"  %fusion.{i} = f32[4] fusion(%p), calls=%g\n" for i in range(20))
    two = TEXT.replace("ENTRY", f"%plain (p: f32[4]) -> f32[4] {{\n{plain}}}\n\nENTRY")
    loop = "  %while.3 = f32[4] while(%p), condition=%forever, body=%plain\n"
    two = two.replace("  ROOT %copy.4", f"{loop}  ROOT %copy.4")
    assert ProgramText(two).block() == ProgramText(TEXT).block()


def test_copies_around_the_loop_are_of_main_memory() -> None:
    assert ProgramText(TEXT).around() == (16 * 4 * 4, 5)
