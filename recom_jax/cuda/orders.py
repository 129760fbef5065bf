"""How the positions of jagged bags lie: side by side, or in any order.

Bags of row splits or lengths, which XLA has as segment ids too, are told apart; of other segment ids in any order, a
block of the kernel that mends gathers its bags' positions first (headers/recom_segments.cuh).
"""

from __future__ import annotations

from recom_jax.cuda.pools import Pools
from recom_jax.cuda.text import Variant
from recom_jax.cuda.units import JAGGED, writes
from recom_jax.program import Instr

# How bags lie that a search of this mode finds (recom_tile.cuh).
BAGS = {"SPLITS": "SplitBags", "LENGTHS": "LengthBags"}


class Orders(Pools):
    """Adds what is known of the order of positions."""

    @property
    def any_order(self) -> bool:
        return self.variant is Variant.ANY

    @property
    def turns(self) -> bool:
        """Whether warps take bags as they get ready."""
        return self.u.form == JAGGED and self.variant is Variant.USUAL

    @property
    def apart(self) -> bool:
        """Whether tiles that have no room in shared memory, or allow no vectors, have code of their own: both are
        rare, and code that holds fewer registers than the usual one's spills nothing, where it shares those of a
        kernel with code that needs all of them."""
        return self.turns and self.u.vec > 1

    def gathered(self) -> list[Instr]:
        """The regions whose bags' positions the block gathers first."""
        return [i for i in self.u.code if i.op == "JREGION" and self.gathers(i)]

    def gathers(self, region: Instr) -> bool:
        """Whether the block gathers its bags' positions first, whose order is any."""
        return self.any_order and self.splits(region) is None

    def gathered_loop(self, seg: int) -> None:
        """The bag's positions among those gathered: threads of its team ask one each, slices take turns."""
        self.put("for (i32 done = 0, met = 0; done < most; done += kLanes * kSlices) {")
        self.depth += 1
        self.put("const int rank = me.slice * kLanes + me.lane;")
        self.put(f"const i32 asked = done + rank < end ? gathered_{seg}.at(done + rank) : -1;")
        self.put(f"const bool is = asked >= 0 && seg_{seg}(asked) == bag;")
        self.put("u32 those = said_by_team(is, kLanes * kSlices, rank);")
        self.put("for (; those != 0; those &= those - 1) {")
        self.depth += 1
        self.put("if ((met++ & (kSlices - 1)) != me.slice) continue;")
        self.put("const i32 q0 = done + __ffs(static_cast<int>(those)) - 1 - me.slice;")

    def gathered_at(self, region: Instr, at: str) -> str:
        """Which position the loop's number `at` is."""
        return f"gathered_{region.args[1]}.at({at})" if self.gathers(region) else at

    def splits(self, region: Instr) -> tuple[str, int, int, int] | None:
        """(search mode, buffer, offset, count) of row splits or lengths.

        If segment ids are `searchsorted(splits, position, right) - 1`, or what `jnp.repeat` makes.
        """
        made = {writes(i): i for i in region.body}
        sub = made.get(region.args[1])
        if sub is None or sub.op != "BINARY" or sub.args[0] != "sub":
            return None
        one, search = made.get(sub.args[3]), made.get(sub.args[2])
        if one is None or one.op != "CONST" or self.u.constants.get(one.args[1]) != 1:
            return None
        while search is not None and search.op == "CONVERT":
            search = made.get(search.args[1])
        if search is None or search.op != "SEARCH" or search.args[1] != "RIGHT":
            return None
        x = made.get(search.args[3])
        while (
            x is not None
            and x.op == "CONVERT"
            and self.integer(x.args[0])
            and self.integer(x.args[1])
        ):
            x = made.get(x.args[1])
        if x is None or x.op != "AFFINE" or not self.integer(x.args[0]):
            return None
        if [self.u.constants.get(s) for s in (x.args[1], *x.args[3:])] != [0, 1]:
            return None
        mode, buffer = search.args[0], search.args[4]
        if self.u.dtypes[buffer] not in ("int32", "int64", "uint32") and mode not in BAGS:
            return None
        return mode, buffer, search.args[5], search.args[6]
