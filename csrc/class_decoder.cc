// Validation of a class's code: registers, spaces, widths and dtypes.

#include <cstring>
#include <utility>

#include "decode.h"
#include "kernels.h"

namespace recom::decode {
namespace {

// Decodes the code of one class and checks it.
class ClassDecoder {
 public:
  ClassDecoder(ColumnClass* cls) : c_(*cls), defined_(cls->regs.size(), 0) {}

  void run(Reader code) {
    while (!code.done()) instruction(&code, /*region=*/-1);
    finish();
  }

 private:
  int reg(Reader* r) { return r->below(c_.regs.size(), "register"); }
  int slot(Reader* r, bool (*kind)(int), const char* what) {
    int s = r->below(c_.slot_kinds.size(), "slot");
    if (!kind(c_.slot_kinds[s])) fail(std::string("slot of the wrong kind: ") + what);
    return s;
  }
  int size_slot(Reader* r) {
    return slot(r, [](int k) { return k == slot_kind::k_IMM || k == slot_kind::k_DIM; }, "size");
  }
  int imm_slot(Reader* r) {
    return slot(r, [](int k) { return k == slot_kind::k_IMM; }, "immediate");
  }
  int operand_slot(Reader* r) {
    return slot(r, [](int k) { return k == slot_kind::k_OPERAND; }, "operand");
  }

  Register& at(int r) { return c_.regs[r]; }
  bool is_row(int r) { return at(r).width_slot >= 0; }

  // A register read here: defined, and in the space that the code runs in.
  void read(int r, bool pos) {
    check(at(r).pos == pos, "register of the wrong space");
    check(defined_[r], "register read before it is written");
    ++at(r).reads;
  }
  void write(int r, bool pos) {
    check(at(r).pos == pos, "register of the wrong space");
    ++at(r).writes;
    defined_[r] = 1;
  }
  void same_type(int a, int b) { check(at(a).dtype == at(b).dtype, "dtypes differ"); }
  void same_width(int a, int b) {
    check(is_row(a) == is_row(b), "a scalar and a row register are mixed");
    int wa = at(a).width_slot, wb = at(b).width_slot;
    if (wa != wb) c_.equal_widths.emplace_back(wa, wb);
  }
  // `a` is combined elementwise into `dst`: the same width, or a scalar spread over a row.
  void fits(int dst, int a) {
    if (is_row(dst) && !is_row(a)) return;
    same_width(dst, a);
  }
  void scalar(int r) { check(!is_row(r), "a scalar register is needed"); }
  void typed(int r, int t) { check(at(r).dtype == t, "register of the wrong dtype"); }

  void strides(Reader* r, Op* op, int64_t expected) {
    check(r->count("strides") == expected, "wrong number of strides");
    for (int64_t i = 0; i < expected; ++i) op->strides.push_back(size_slot(r));
  }
  int64_t rank_here(int region) {
    if (region < 0) return c_.outer.size();
    const Op& enclosing = c_.ops[region];
    if (enclosing.op == opcode::k_JREGION) return 1;
    return c_.outer.size() + enclosing.strides.size();
  }

  void instruction(Reader* code, int region) {
    int op = code->below(opcode::k_count, "opcode");
    int64_t n_words = code->next();
    check(n_words >= 2, "bad instruction length");
    Reader r = code->sub(n_words - 2);
    if (op == opcode::k_REGION || op == opcode::k_JREGION) {
      check(region < 0, "a region inside a region");
      decode_region(op, &r);
    } else {
      Op o;
      o.op = op;
      o.pos = region >= 0;
      o.region = region;
      fields(&o, &r);
      c_.ops.push_back(std::move(o));
    }
    check(r.done(), "instruction longer than its fields");
  }

  void decode_region(int op, Reader* r) {
    Op o;
    o.op = op;
    if (op == opcode::k_REGION) {
      int64_t n = r->count("inner sizes");
      check(n <= kMaxRank, "too many inner sizes");
      for (int64_t i = 0; i < n; ++i) o.strides.push_back(size_slot(r));
    } else {
      check(c_.outer.size() == 1, "a jagged region needs one outer dim");
      c_.jagged = true;
      o.n = size_slot(r);
      o.a = reg(r);
      check(at(o.a).pos && is_integer(at(o.a).dtype), "seg must be an integer per position");
      scalar(o.a);
      check(at(o.a).writes == 0, "seg is written by one instruction of its region");
    }
    int self = c_.ops.size();
    c_.ops.push_back(o);
    // A position register never outlives its region: the next chunk overwrites it.
    for (size_t i = 0; i < c_.regs.size(); ++i) {
      if (c_.regs[i].pos) defined_[i] = 0;
    }
    Reader body = r->sub(r->next());
    pending_.clear();
    while (!body.done()) {
      instruction(&body, self);
      if (op == opcode::k_JREGION && defined_[o.a] && !c_.ops[self].n_seg_ops) {
        check(pending_.empty(), "a reduction before seg is known");
        c_.ops[self].n_seg_ops = c_.ops.size() - self - 1;
      }
    }
    if (op == opcode::k_JREGION) {
      check(defined_[o.a] && at(o.a).writes == 1,
            "seg is written by one instruction of its region");
      ++at(o.a).reads;
    }
    for (int dst : pending_) defined_[dst] = 1;
    pending_.clear();
    c_.ops[self].body_end = c_.ops.size();
  }

  // A reduction's destination is complete only after its region.
  void reduction(int dst, bool in_region) {
    check(in_region, "a reduction outside a region");
    check(!at(dst).pos, "a reduction's destination is per bag");
    check(++at(dst).writes == 1, "a reduction's destination has one writer");
    pending_.push_back(dst);
  }

  void fields(Op* o, Reader* r);
  void finish();

  ColumnClass& c_;
  std::vector<char> defined_;
  std::vector<int> pending_;
};

void ClassDecoder::fields(Op* o, Reader* r) {
  const Kernels& k = base_kernels();
  const bool pos = o->pos;
  switch (o->op) {
    case opcode::k_LOAD: {
      o->dst = reg(r);
      o->buffer = operand_slot(r);
      o->offset = size_slot(r);
      strides(r, o, rank_here(o->region) + is_row(o->dst));
      if (is_row(o->dst)) {
        o->feature = o->strides.back();
        o->strides.pop_back();
      }
      return write(o->dst, pos);
    }
    case opcode::k_AFFINE:
      o->dst = reg(r);
      o->offset = size_slot(r);
      strides(r, o, rank_here(o->region));
      scalar(o->dst);
      check(!is_half(at(o->dst).dtype), "affine into a half");
      return write(o->dst, pos);
    case opcode::k_CONST:
      o->dst = reg(r);
      o->fill = imm_slot(r);
      return write(o->dst, pos);
    case opcode::k_EXPAND:
      o->dst = reg(r);
      o->a = reg(r);
      check(pos && c_.ops[o->region].op == opcode::k_REGION, "EXPAND outside a plain region");
      read(o->a, false);
      same_type(o->dst, o->a);
      same_width(o->dst, o->a);
      return write(o->dst, true);
    case opcode::k_UNARY: {
      o->sub = r->below(unary::k_count, "unary op");
      o->dst = reg(r);
      o->a = reg(r);
      read(o->a, pos);
      check(k.unary[o->sub][at(o->a).dtype], "unary op on this dtype");
      typed(o->dst, o->sub == unary::k_is_finite ? int{dtype::k_PRED} : at(o->a).dtype);
      same_width(o->dst, o->a);
      return write(o->dst, pos);
    }
    case opcode::k_BINARY: {
      o->sub = r->below(binary::k_count, "binary op");
      o->dst = reg(r);
      o->a = reg(r);
      o->b = reg(r);
      read(o->a, pos);
      read(o->b, pos);
      same_type(o->a, o->b);
      check(k.binary[o->sub][at(o->a).dtype], "binary op on this dtype");
      typed(o->dst, o->sub >= binary::k_eq ? int{dtype::k_PRED} : at(o->a).dtype);
      fits(o->dst, o->a);
      fits(o->dst, o->b);
      return write(o->dst, pos);
    }
    case opcode::k_SELECT:
      o->dst = reg(r);
      o->a = reg(r);
      o->b = reg(r);
      o->c = reg(r);
      for (int x : {o->a, o->b, o->c}) {
        read(x, pos);
        fits(o->dst, x);
      }
      typed(o->a, dtype::k_PRED);
      same_type(o->dst, o->b);
      same_type(o->dst, o->c);
      return write(o->dst, pos);
    case opcode::k_CONVERT:
    case opcode::k_BITCAST:
      o->dst = reg(r);
      o->a = reg(r);
      read(o->a, pos);
      same_width(o->dst, o->a);
      if (o->op == opcode::k_BITCAST) {
        check(at(o->dst).size == at(o->a).size, "bitcast between sizes");
        check((at(o->dst).dtype == dtype::k_PRED) == (at(o->a).dtype == dtype::k_PRED),
              "bitcast of PRED");
      } else {
        check(at(o->dst).dtype == at(o->a).dtype || k.convert[at(o->a).dtype][at(o->dst).dtype],
              "no such conversion");
      }
      return write(o->dst, pos);
    case opcode::k_SEARCH:
    case opcode::k_SEARCH_UNIFORM: {
      bool uniform = o->op == opcode::k_SEARCH_UNIFORM;
      if (!uniform) o->sub = r->below(search_mode::k_count, "search mode");
      o->side = r->below(2, "search side");
      o->dst = reg(r);
      o->a = reg(r);
      if (uniform) {
        o->fill = imm_slot(r);  // start
        o->init = imm_slot(r);  // step
      } else {
        o->buffer = operand_slot(r);
        o->offset = size_slot(r);
      }
      o->n = size_slot(r);
      if (by_bags(*o)) o->total = size_slot(r);
      read(o->a, pos);
      check(by_bags(*o) ? element_size(at(o->a).dtype) >= 4 && is_integer(at(o->a).dtype)
                        : k.search[0][at(o->a).dtype] != nullptr,
            "search on this dtype");
      typed(o->dst, dtype::k_S32);
      check(o->dst != o->a, "search in place");
      scalar(o->a);
      scalar(o->dst);
      return write(o->dst, pos);
    }
    case opcode::k_INDEX:
      o->sub = r->below(2, "index mode");
      o->dst = reg(r);
      o->a = reg(r);
      o->n = size_slot(r);
      read(o->a, pos);
      check(k.index[0][at(o->a).dtype], "index from this dtype");
      typed(o->dst, dtype::k_S64);
      scalar(o->a);
      scalar(o->dst);
      return write(o->dst, pos);
    case opcode::k_PREDICATE:
      o->dst = reg(r);
      o->a = reg(r);
      o->b = reg(r);
      read(o->a, pos);
      read(o->b, pos);
      typed(o->dst, dtype::k_S64);
      typed(o->a, dtype::k_S64);
      typed(o->b, dtype::k_PRED);
      for (int x : {o->dst, o->a, o->b}) scalar(x);
      return write(o->dst, pos);
    case opcode::k_TAKE:
    case opcode::k_POOL: {
      bool pool = o->op == opcode::k_POOL;
      o->flags = r->below(flag::k_all + 1, "flags");
      if (pool) o->sub = r->below(combine::k_count, "pool kind");
      o->dst = reg(r);
      o->a = reg(r);
      if (pool) {
        int64_t w = r->next();
        check(w >= -1 && w < static_cast<int64_t>(c_.regs.size()), "out of range: weight");
        o->b = static_cast<int>(w);
      }
      o->buffer = operand_slot(r);
      o->offset = size_slot(r);
      o->n = size_slot(r);
      o->fill = imm_slot(r);
      if (pool) o->init = imm_slot(r);
      read(o->a, pos);
      typed(o->a, dtype::k_S64);
      scalar(o->a);
      check(is_row(o->dst), "a lookup's destination is a row register");
      if (!pool) return write(o->dst, pos);
      check(!is_half(at(o->dst).dtype), "a pool accumulates in float32 or wider");
      if (o->b >= 0) {
        read(o->b, true);
        same_type(o->b, o->dst);
        scalar(o->b);
      }
      return reduction(o->dst, pos);
    }
    case opcode::k_ACC:
      o->sub = r->below(combine::k_count, "pool kind");
      o->dst = reg(r);
      o->a = reg(r);
      o->init = imm_slot(r);
      read(o->a, true);
      same_type(o->dst, o->a);
      same_width(o->dst, o->a);
      check(k.acc[o->sub][at(o->dst).dtype], "reduction of this dtype");
      return reduction(o->dst, pos);
    case opcode::k_STORE:
      o->a = reg(r);
      o->buffer = slot(r, [](int kind) { return kind == slot_kind::k_RESULT; }, "result");
      o->offset = size_slot(r);
      strides(r, o, c_.outer.size());
      o->feature = size_slot(r);
      check(!pos, "STORE inside a region");
      return read(o->a, false);
    default:
      fail("unknown opcode");
  }
}

// Layout of scratch and derived words, and the rewrites that need the whole class.
void ClassDecoder::finish() {
  std::vector<int> writer(c_.regs.size(), -1);
  for (size_t i = 0; i < c_.ops.size(); ++i) {
    if (c_.ops[i].dst >= 0) writer[c_.ops[i].dst] = i;
  }
  // The only writer of r, or null.
  auto def = [&](int r) { return at(r).writes == 1 ? &c_.ops[writer[r]] : nullptr; };

  std::vector<int> imm_reads(c_.regs.size(), 0);
  for (Op& o : c_.ops) {
    if (o.op == opcode::k_BINARY && !is_row(o.b)) {
      // A row destination spreads a scalar `b`, which an immediate does for free.
      const Op* d = def(o.b);
      if (d && d->op == opcode::k_CONST && !is_row(o.b)) ++imm_reads[o.b];
    }
    if (o.op == opcode::k_STORE) {
      const Op* d = def(o.a);
      bool lookup = d && (d->op == opcode::k_TAKE || d->op == opcode::k_POOL);
      if (lookup && at(o.a).reads == 1) {
        o.fused_from = writer[o.a];
        c_.ops[writer[o.a]].fuse_store = &o - c_.ops.data();
      }
    }
    if ((o.op == opcode::k_TAKE || o.op == opcode::k_POOL) && (o.flags & flag::k_ONE_HOT) &&
        is_float(at(o.dst).dtype)) {
      check(o.op == opcode::k_TAKE || o.sub == combine::k_SUM, "a one-hot pool is a sum");
      const Op* d = def(o.a);
      if (d && d->op == opcode::k_PREDICATE) d = def(d->a);
      if (d && d->op == opcode::k_EXPAND) d = def(d->a);
      check(d && d->op == opcode::k_INDEX, "a one-hot lookup's ids come from INDEX");
      o.rows_slot = d->n;
    }
  }
  int lookups = 0;
  for (const Op& o : c_.ops) {
    lookups += o.op == opcode::k_TAKE || o.op == opcode::k_STORE || o.op == opcode::k_REGION ||
               o.op == opcode::k_JREGION;
  }
  const int last = static_cast<int>(c_.ops.size()) - 1;
  if (lookups == 2 && last >= 1 && c_.ops[last].fused_from == last - 1 &&
      c_.ops[last - 1].op == opcode::k_TAKE && !(c_.ops[last - 1].flags & flag::k_ONE_HOT)) {
    c_.plain_take = last - 1;
  }
  int words = c_.slot_kinds.size();
  for (size_t i = 0; i < c_.regs.size(); ++i) {
    Register& g = c_.regs[i];
    g.uniform = g.writes == 1 && g.reads > 0 && g.reads == imm_reads[i];
    g.writer = writer[i];
    g.word = words++;
  }
  for (Op& o : c_.ops) {
    o.words = words;
    switch (o.op) {
      case opcode::k_LOAD:
      case opcode::k_AFFINE:
      case opcode::k_STORE:
        words += 1 + 2 * o.strides.size();
        break;
      case opcode::k_TAKE:
      case opcode::k_POOL:
        words += 3;  // limit, fused, one-hot scan
        break;
      case opcode::k_REGION:
        words += 1;  // positions per bag
        break;
    }
  }
  c_.n_words = words;
}

}  // namespace

void decode_class(Reader* r, ColumnClass* c) {
  int64_t n_slots = r->count("slots");
  for (int64_t i = 0; i < n_slots; ++i) {
    c->slot_kinds.push_back(r->below(slot_kind::k_count, "slot kind"));
  }
  auto width_kind = [&](int64_t s) {
    return s >= 0 && s < n_slots && c->slot_kinds[s] <= slot_kind::k_DIM;
  };
  int64_t n_regs = r->count("registers", 3);
  check(n_regs <= kMaxRegs, "too many registers");
  for (int64_t i = 0; i < n_regs; ++i) {
    Register g;
    g.pos = r->below(2, "space");
    int64_t t = r->next();
    g.size = element_size(t);
    check(g.size > 0, "unknown dtype");
    g.dtype = static_cast<int>(t);
    int64_t w = r->next();
    check(w == -1 || width_kind(w), "bad register width");
    g.width_slot = static_cast<int>(w);
    c->regs.push_back(g);
  }
  int64_t n_outer = r->count("outer dims");
  check(n_outer <= kMaxRank, "too many outer dims");
  for (int64_t i = 0; i < n_outer; ++i) {
    int64_t s = r->next();
    check(width_kind(s), "bad outer slot");
    c->outer.push_back(static_cast<int>(s));
  }
  int64_t n_code = r->count("code");
  ClassDecoder(c).run(r->sub(n_code));
}

}  // namespace recom::decode
