"""The text of an optimised program tells the cycles, messages and copies of a turn of its loop."""

from __future__ import annotations

import re

from eval.lib.times.hlo import ProgramText


def full(text: str) -> str:
    """Return a program's text with its short entries as XLA writes them: `at draft/while` is an
    operation's name within the loop, and `cycles 3` its cost.
    """
    text = re.sub(r"at ([\w/]+)", r'metadata={op_name="jit(run)/while/body/\1"}', text)
    return re.sub(r"cycles (\d+)", r'backend_config={"estimated_cycles":"\1"}', text)


TEXT = full("""HloModule jit_run_decode, is_scheduled=true

%drafting (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  %step.1 = f32[4]{0} fusion(%p), calls=%f, at draft/while/body/dot, cycles 10
  ROOT %all-reduce.1 = f32[4]{0} all-reduce(%step.1), at draft/while/body/sum
}

%until (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]) parameter(0)
  %constant.4 = s32[]{:T(128)} constant(4)
  ROOT %lt = pred[] compare(%p, %constant.4), direction=LT
}

%drawn (p: f32[4]) -> f32[4] {
  ROOT %sort.1 = f32[4]{0} sort(%p), at verify/cond/sort, cycles 900
}

%best (p: f32[4]) -> f32[4] {
  ROOT %max.1 = f32[4]{0} fusion(%p), calls=%g, at verify/cond/max, cycles 7
}

%block (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %while.2 = (s32[], f32[4]) while(%p), condition=%until, body=%drafting, at draft/while
  %copy.1 = bf16[2,8]{1,0} copy(%x), at extend/transpose, cycles 3
  ROOT %last = f32[4]{0} conditional(%y, %x), branch_computations={%drawn, %best}, at verify/cond
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %copy.2 = f32[16,4]{0,1} copy(%p)
  %copy.3 = f32[16,4]{0,1:T(8)S(1)} copy(%p)
  %while.1 = (s32[], f32[4]) while(%p), condition=%forever, body=%block
  ROOT %copy.4 = s8[5]{0} copy(%while.1)
}
""")


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


THREE = """HloModule jit_run_decode, is_scheduled=true

%sums (p: f32[8]) -> f32[8] {
  ROOT %all-reduce.1 = f32[8]{0} all-reduce(%p), channel_id=1, to_apply=%add
}

%block (p: f32[8]) -> f32[8] {
  %begin.1 = (f32[8]{0}, f32[8]{0}) fusion(%p), kind=kCustom, calls=%sums
  %part.1 = f32[8]{0} get-tuple-element(%begin.1), index=1
  %run.1 = f32[8]{0} fusion(%part.1, %x), kind=kCustom, calls=%sums
  %end.1 = f32[8]{0} fusion(%run.1), kind=kCustom, calls=%sums
  %product.1 = f32[8]{0} multiply(%end.1, %end.1)
  %begin.2 = f32[8]{0} fusion(%product.1), kind=kCustom, calls=%sums
  %end.2 = f32[8]{0} fusion(%begin.2), kind=kCustom, calls=%sums
  %all-reduce.2 = f32[8]{0} all-reduce(%end.2), channel_id=2, to_apply=%add
  ROOT %all-reduce.3 = f32[8]{0} all-reduce(%all-reduce.2), channel_id=2, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  ROOT %while.1 = f32[8] while(%p), condition=%forever, body=%block
}
"""


def test_a_message_in_three_fusions_counts_once_and_equal_layers_each() -> None:
    block = ProgramText(THREE).block()
    assert block.collectives.total() == 4
    assert block.sent.total() == 4 * 8 * 4


def test_of_two_loops_that_which_drafts_is_the_block() -> None:
    plain = "".join(f"  %fusion.{i} = f32[4] fusion(%p), calls=%g\n" for i in range(20))
    two = TEXT.replace("ENTRY", f"%plain (p: f32[4]) -> f32[4] {{\n{plain}}}\n\nENTRY")
    loop = "  %while.3 = f32[4] while(%p), condition=%forever, body=%plain\n"
    two = two.replace("  ROOT %copy.4", f"{loop}  ROOT %copy.4")
    assert ProgramText(two).block() == ProgramText(TEXT).block()


def test_copies_around_the_loop_are_of_main_memory() -> None:
    assert ProgramText(TEXT).around() == (16 * 4 * 4, 5)


MOVING = """HloModule jit_run_decode, is_scheduled=true

%step (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[], f32[64]) parameter(0)
  %matrix = f32[64]{0:T(256)} get-tuple-element(%p), index=1
  ROOT %dot = f32[2]{0:S(1)} dot(%matrix, %x)
}

%until (p: (s32[], f32[64])) -> pred[] {
  %constant.4 = s32[]{:T(128)} constant(4)
}

%taken (rows: f32[100,8], update: f32[1,8], at: s32[]) -> f32[1,8] {
  %rows = f32[100,8]{1,0:T(8,128)} parameter(0)
  %flat = f32[800]{0} bitcast(%rows)
  %at = s32[] parameter(2)
  ROOT %slice = f32[1,8]{1,0} dynamic-slice(%flat, %at)
}

%inside (cache: f32[100,8], new: f32[1,8]) -> f32[100,8] {
  %cache = f32[100,8]{1,0:T(8,128)} parameter(0)
  %new = f32[1,8]{1,0} parameter(1)
  ROOT %update = f32[100,8]{1,0:T(8,128)} dynamic-update-slice(%cache, %new, %zero)
}

%shaped (p: f32[64]) -> f32[8,8] {
  %p = f32[64]{0} parameter(0)
  ROOT %shape = f32[8,8]{1,0} bitcast(%p)
}

%whole (p: f32[64]) -> f32[8,8] {
  %p = f32[64]{0} parameter(0)
  %shaped.1 = f32[8,8]{1,0} fusion(%p), kind=kLoop, calls=%shaped
  ROOT %twice = f32[8,8]{1,0} add(%shaped.1, %shaped.1)
}

%block (p: f32[8]) -> f32[8] {
  %weights = f32[64]{0:T(256)} get-tuple-element(%p), index=1
  %cache = f32[100,8]{1,0:T(8,128)} get-tuple-element(%p), index=2
  %small = f32[1,8]{1,0:T(8,128)S(1)} get-tuple-element(%p), index=3
  %one = (f32[64]{0:T(256)S(1)}, f32[64]{0:T(256)}, u32[]{:S(2)}) copy-start(%weights)
  %some = ((f32[64]{0:T(256)}), f32[16]{0:T(256)S(1)}, s32[]) slice-start(%weights), slice={[0:16]}
  %some-done = f32[16]{0:T(256)S(1)} slice-done(%some)
  %joined = f32[64]{0:T(256)S(1)} custom-call(%some-done), custom_call_target="ConcatBitcast"
  %row = f32[1,8]{1,0:S(1)} fusion(%cache, %small, %at), kind=kLoop, calls=%taken
  %written = f32[100,8]{1,0:T(8,128)} fusion(%cache, %row), kind=kLoop, calls=%inside
  %seen = f32[8,8]{1,0:S(1)} fusion(%weights), kind=kLoop, calls=%whole
  ROOT %while.2 = (s32[], f32[64]) while(%p), condition=%until, body=%step
}

ENTRY %main (p: f32[8]) -> f32[8] {
  ROOT %while.1 = f32[8] while(%p), condition=%forever, body=%block
}
"""


def test_bytes_of_main_memory() -> None:
    """Bytes of main memory count a prefetched array, one that a fusion reads, and a loop's on each
    turn as whole, and a slice, a row and an update in part.
    """
    whole, part, row = 64 * 4, 16 * 4, 8 * 4
    assert ProgramText(MOVING).block().moved.total() == whole + part + row + row + whole + 4 * whole
