"""Triton kernels of :mod:`lipdp.privacy.noise`: ChaCha20, keys that depend on what is on the device, and the noise itself.

All arithmetic is in whole numbers but the rounding of sums and what is stored, which follow the processor's to the bit.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _turn(x, left: tl.constexpr):
    return (x << left) | (x >> (32 - left))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _turn(d ^ a, 16)
    c += d
    b = _turn(b ^ c, 12)
    a += b
    d = _turn(d ^ a, 8)
    c += d
    b = _turn(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _rounds(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15):
    for _ in tl.static_range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _load_key(key):
    return (
        tl.load(key).to(tl.uint32),
        tl.load(key + 1).to(tl.uint32),
        tl.load(key + 2).to(tl.uint32),
        tl.load(key + 3).to(tl.uint32),
        tl.load(key + 4).to(tl.uint32),
        tl.load(key + 5).to(tl.uint32),
        tl.load(key + 6).to(tl.uint32),
        tl.load(key + 7).to(tl.uint32),
    )


@triton.jit
def _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, n0, n1, n2):
    """A block for each counter: sixteen words."""
    zero = counter * 0
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _rounds(
        c0, c1, c2, c3, zero + k0, zero + k1, zero + k2, zero + k3, zero + k4, zero + k5, zero + k6, zero + k7,
        counter, zero + n0, zero + n1, zero + n2,
    )  # fmt: skip
    return (
        x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1, x6 + k2, x7 + k3, x8 + k4, x9 + k5, x10 + k6, x11 + k7,
        x12 + counter, x13 + n0, x14 + n1, x15 + n2,
    )  # fmt: skip


@triton.jit
def _wide(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit(do_not_specialize=["first", "n0", "n1", "n2"])
def blocks(out, key, first, n0, n1, n2, count, BLOCK: tl.constexpr):
    """ChaCha20 itself, (count, 16) words, for known answers."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k0, k1, k2, k3, k4, k5, k6, k7 = _load_key(key)
    counter, a, b, c = (row + first).to(tl.uint32), n0.to(tl.uint32), n1.to(tl.uint32), n2.to(tl.uint32)
    words = _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, a, b, c)
    for place in tl.static_range(16):
        tl.store(out + row * 16 + place, words[place].to(tl.int32, bitcast=True), mask=row < count)


@triton.jit(do_not_specialize=["pairs"])
def absorb(key, words, pairs, out):
    """A key, mixed with pairs of words by HChaCha20, once for each pair."""
    k0, k1, k2, k3, k4, k5, k6, k7 = _load_key(key)
    zero = k0 * 0
    for pair in range(pairs):
        a, b = tl.load(words + 2 * pair).to(tl.uint64), tl.load(words + 2 * pair + 1).to(tl.uint64)
        x0, x1, x2, x3, _x4, _x5, _x6, _x7, _x8, _x9, _x10, _x11, x12, x13, x14, x15 = _rounds(
            zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574, k0, k1, k2, k3, k4, k5, k6, k7,
            a.to(tl.uint32), (a >> 32).to(tl.uint32), b.to(tl.uint32), (b >> 32).to(tl.uint32),
        )  # fmt: skip
        k0, k1, k2, k3, k4, k5, k6, k7 = x0, x1, x2, x3, x12, x13, x14, x15
    tl.store(out, k0.to(tl.int32, bitcast=True))
    tl.store(out + 1, k1.to(tl.int32, bitcast=True))
    tl.store(out + 2, k2.to(tl.int32, bitcast=True))
    tl.store(out + 3, k3.to(tl.int32, bitcast=True))
    tl.store(out + 4, k4.to(tl.int32, bitcast=True))
    tl.store(out + 5, k5.to(tl.int32, bitcast=True))
    tl.store(out + 6, k6.to(tl.int32, bitcast=True))
    tl.store(out + 7, k7.to(tl.int32, bitcast=True))


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _add_digest(values, block, count, a, b, c, d, out, BLOCK: tl.constexpr):
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    word = tl.load(values + place, mask=inside, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
    position = place.to(tl.uint64)
    one = tl.sum(tl.where(inside, _mixed(word + position * a + b), 0).to(tl.int64, bitcast=True))
    two = tl.sum(tl.where(inside, _mixed(word + position * c + d), 0).to(tl.int64, bitcast=True))
    tl.atomic_add(out, one)
    tl.atomic_add(out + 1, two)


@triton.jit(do_not_specialize=["n0", "n1", "n2"])
def digest(p0, p1, p2, n0, n1, n2, secret, out, BLOCK: tl.constexpr):
    """Of up to three tensors two keyed sums each over words and their positions, as in lipdp.digest, added to rows of ``out``."""
    s0, s1, s2, s3, s4, s5, s6, s7 = _load_key(secret)
    a, b, c, d = _wide(s0, s1) | 1, _wide(s2, s3), _wide(s4, s5) | 1, _wide(s6, s7)
    block = tl.program_id(0)
    first, second = (n0 + BLOCK - 1) // BLOCK, (n1 + BLOCK - 1) // BLOCK
    if block < first:
        _add_digest(p0, block, n0, a, b, c, d, out, BLOCK)
    elif block < first + second:
        _add_digest(p1, block - first, n1, a, b, c, d, out + 2, BLOCK)
    else:
        _add_digest(p2, block - first - second, n2, a, b, c, d, out + 4, BLOCK)


@triton.jit
def _power(exponent):
    """2^exponent in float64, by its bits: numbers that are handed to a kernel come in float32."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _released(total, noise, exponent):
    """(round(S/g) + (N + ½))·g with g = 2^exponent, in float64; sums stay below 2^1000, as on a processor."""
    inverse, spacing, most = _power(-exponent), _power(exponent), _power(1000 - tl.maximum(exponent, 0))
    steps = total.to(tl.float64) * inverse
    steps = tl.where(steps == steps, steps, 0.0)
    size = tl.minimum(tl.abs(steps), most)
    size = tl.where(size < 4503599627370496.0, (size + 4503599627370496.0) - 4503599627370496.0, size)  # to even, at 2^52
    return (tl.where(steps < 0, -size, size) + (noise.to(tl.float64) + 0.5)) * spacing


@triton.jit(do_not_specialize=["count", "capacity", "segment", "exponent"])
def draw(
    sums,
    released,
    key,
    cells,
    slow_places,
    slow_words,
    slow_count,
    count,
    capacity,
    exponent,
    segment,
    CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Noise where the first word decides it; the others are put on a list, in any order."""
    k0, k1, k2, k3, k4, k5, k6, k7 = _load_key(key)
    counter = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    zero = k0 * 0
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _chacha(
        k0, k1, k2, k3, k4, k5, k6, k7, counter, zero, zero + segment.to(tl.uint32), zero
    )
    even = tl.join(tl.join(_wide(x0, x1), _wide(x8, x9)), tl.join(_wide(x4, x5), _wide(x12, x13)))
    odd = tl.join(tl.join(_wide(x2, x3), _wide(x10, x11)), tl.join(_wide(x6, x7), _wide(x14, x15)))
    words = tl.reshape(tl.join(even, odd), (8 * BLOCK,))
    place = tl.program_id(0).to(tl.int64) * 8 * BLOCK + tl.arange(0, 8 * BLOCK)
    inside = place < count
    chosen = tl.load(cells + ((words << 1) >> (64 - CELLS)).to(tl.int32)).to(tl.int64)
    signed = words.to(tl.int64, bitcast=True)
    noise = ((chosen ^ (signed >> 63)) << 36) | (signed & 0xFFFFFFFFF)
    slow = inside & (chosen < 0)
    total = tl.load(sums + place, mask=inside, other=0.0)
    value = _released(total, noise, exponent)
    tl.store(released + place, value.to(released.dtype.element_ty), mask=inside & (chosen >= 0))
    ones = slow.to(tl.int32)
    base = tl.atomic_add(slow_count, tl.sum(ones))
    row = base + tl.cumsum(ones, 0) - 1
    listed = slow & (row < capacity)
    tl.store(slow_places + row, place.to(tl.int32), mask=listed)
    tl.store(slow_words + row, signed, mask=listed)


@triton.jit
def _word(k0, k1, k2, k3, k4, k5, k6, k7, place, n0, n1, n2):
    """The word of 64 bits at each place, eight to a block."""
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _chacha(
        k0, k1, k2, k3, k4, k5, k6, k7, (place >> 3).to(tl.uint32), n0, n1, n2
    )
    which = place & 7
    word = tl.where(which == 0, _wide(x0, x1), _wide(x2, x3))
    word = tl.where(which == 2, _wide(x4, x5), word)
    word = tl.where(which == 3, _wide(x6, x7), word)
    word = tl.where(which == 4, _wide(x8, x9), word)
    word = tl.where(which == 5, _wide(x10, x11), word)
    word = tl.where(which == 6, _wide(x12, x13), word)
    return tl.where(which == 7, _wide(x14, x15), word)


@triton.jit
def _upper_product(a1, a0, b1, b0):
    """The upper 128 bits of the product of two numbers of 128 bits, as (upper, lower) words."""
    middle = tl.umulhi(a0, b0)
    p, q = a0 * b1, a1 * b0
    middle += p
    carry = (middle < p).to(tl.uint64)
    middle += q
    carry += (middle < q).to(tl.uint64)
    top = tl.umulhi(a1, b1)
    low = a1 * b1
    for part in tl.static_range(3):
        if part == 0:
            more = tl.umulhi(a0, b1)
        elif part == 1:
            more = tl.umulhi(a1, b0)
        else:
            more = carry
        low += more
        top += (low < more).to(tl.uint64)
    return top, low


@triton.jit
def _minus(a1, a0, b1, b0):
    return a1 - b1 - (a0 < b0).to(tl.uint64), a0 - b0


@triton.jit
def _is_under(chosen, v1, v0, drawn1, drawn0, half_square, heights, series, TERMS: tl.constexpr):
    """As ``lipdp.privacy.noise.is_under``."""
    h1, h0 = tl.load(half_square).to(tl.uint64), tl.load(half_square + 1).to(tl.uint64)
    zero = v0 * 0
    s1, s0 = _upper_product(v1, v0, zero + h1, zero + h0)
    factor = (2 * chosen).to(tl.uint64)
    t1, t0 = s1 * factor + tl.umulhi(s0, factor), s0 * factor
    u1, u0 = _upper_product(s1, s0, v1, v0)
    t0 += u0
    t1 += u1 + (t0 < u0).to(tl.uint64)
    i1 = zero + tl.load(series + 2 * (TERMS - 2)).to(tl.uint64)
    i0 = zero + tl.load(series + 2 * (TERMS - 2) + 1).to(tl.uint64)
    for back in range(1, TERMS - 1):
        p1, p0 = _upper_product(t1, t0, i1, i0)
        c1 = tl.load(series + 2 * (TERMS - 2 - back)).to(tl.uint64)
        c0 = tl.load(series + 2 * (TERMS - 2 - back) + 1).to(tl.uint64)
        i1, i0 = _minus(zero + c1, zero + c0, p1, p0)
    p1, p0 = _upper_product(t1, t0, i1, i0)
    p1, p0 = _upper_product(t1, t0, p1, p0)
    left1, left0 = _minus(t1, t0, p1, p0)
    e1, e0 = tl.load(heights + 2 * chosen).to(tl.uint64), tl.load(heights + 2 * chosen + 1).to(tl.uint64)
    right1, right0 = _upper_product(e1, e0, drawn1, drawn0)
    return (left1 < right1) | ((left1 == right1) & (left0 < right0))


@triton.jit(do_not_specialize=["capacity", "bins", "segment", "exponent"])
def settle(
    sums,
    released,
    key,
    ends,
    heights,
    half_square,
    series,
    slow_places,
    slow_words,
    slow_count,
    capacity,
    bins,
    exponent,
    segment,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Noise for the places on the list, with as many bits as it takes."""
    k0, k1, k2, k3, k4, k5, k6, k7 = _load_key(key)
    total = tl.minimum(tl.load(slow_count), capacity)
    start = tl.program_id(0) * BLOCK
    zero = k0 * 0
    number = zero + segment.to(tl.uint32)
    while start < total:
        row = start + tl.arange(0, BLOCK)
        listed = row < total
        place = tl.load(slow_places + row, mask=listed, other=0)
        words = tl.load(slow_words + row, mask=listed, other=0).to(tl.uint64, bitcast=True)
        noise = place.to(tl.int64) * 0
        active = listed
        attempt = zero
        while tl.max(active.to(tl.int32)) > 0:
            if attempt > 0:
                words = _word(k0, k1, k2, k3, k4, k5, k6, k7, place, zero, number, attempt)
            more = _word(k0, k1, k2, k3, k4, k5, k6, k7, place, zero + 1, number, attempt)
            x0, x1, x2, x3, x4, x5, x6, x7, x8, _x9, _x10, _x11, _x12, _x13, _x14, _x15 = _chacha(
                k0, k1, k2, k3, k4, k5, k6, k7, place.to(tl.uint32), zero + 2, number, attempt
            )
            # The choice: 27 bits, 24, and 77 of 96; as upper and lower words.
            upper = (((words << 1) >> 37) << 37) | ((more >> 40) << 13) | (_wide(x1, x2) >> 51)
            lower = (_wide(x1, x2) << 13) | (x0 >> 19).to(tl.uint64)
            # How many ends are at most the choice: by halving.
            low, high = place * 0, place * 0 + (2 * bins - 1)
            for _ in range(11):
                middle = (low + high) // 2
                open_ = low < high
                e1 = tl.load(ends + 2 * middle, mask=open_, other=0).to(tl.uint64, bitcast=True)
                e0 = tl.load(ends + 2 * middle + 1, mask=open_, other=0).to(tl.uint64, bitcast=True)
                reached = (e1 < upper) | ((e1 == upper) & (e0 <= lower))
                low = tl.where(open_ & reached, middle + 1, low)
                high = tl.where(open_ & (reached == 0), middle, high)
            boxed = low >= bins
            chosen = tl.where(boxed, low - bins, low)
            signed = words.to(tl.int64, bitcast=True)
            sign = signed >> 63
            inside = ((signed ^ sign) & 0xFFFFFFFFF).to(tl.uint64)
            # The place: 36 bits, and 92 of 96. The height: 40, and 88 of 96.
            v1 = (inside << 28) | (_wide(x4, x5) >> 36)
            v0 = (_wide(x4, x5) << 28) | (x3 >> 4).to(tl.uint64)
            d1 = (more << 24) | (_wide(x7, x8) >> 40)
            d0 = (_wide(x7, x8) << 24) | (x6 >> 8).to(tl.uint64)
            fine = _is_under(chosen, v1, v0, d1, d0, half_square, heights, series, TERMS)
            fine = (fine | (boxed == 0)) & active
            noise = tl.where(fine, ((chosen.to(tl.int64) ^ sign) << 36) | (signed & 0xFFFFFFFFF), noise)
            active = active & (fine == 0)
            attempt += 1
        value = _released(tl.load(sums + place, mask=listed, other=0.0), noise, exponent)
        tl.store(released + place, value.to(released.dtype.element_ty), mask=listed)
        start += tl.num_programs(0) * BLOCK
