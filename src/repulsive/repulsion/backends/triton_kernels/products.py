"""Products of float32 matrices on tensor cores, as accurate as float32.

Tensor cores read the first 11 significant bits of a number (TF32). With x = big + small, where big is x rounded to 11
bits and small = x - big without error, a product is

    x y = big big' + big small' + small big' + small small'

The last term is left out: it is below 2^-22 of the product, as the bits of small that tensor cores do not read.

The values of PRECISION are "split" for these formulas, "tf32x3" for the same by Triton, which takes a quarter more
instructions because it handles infinity (with "split", infinite numbers give NaN), and "ieee" for products without
tensor cores.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def split(x):
    """Split float32 numbers into their first 11 significant bits and the rest."""
    bits = x.to(tl.int32, bitcast=True)
    big = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)  # a carry into the exponent rounds up
    return big, x - big


@triton.jit
def product(a, x, PRECISION: tl.constexpr):
    """Compute a @ x."""
    if PRECISION == "split":
        a_big, a_small = split(a)
        x_big, x_small = split(x)
        out = tl.dot(a_small, x_big, input_precision="tf32")
        out = tl.dot(a_big, x_small, acc=out, input_precision="tf32")
        out = tl.dot(a_big, x_big, acc=out, input_precision="tf32")
    else:
        out = tl.dot(a, x, input_precision=PRECISION)
    return out


@triton.jit
def add_squares(total, rest, x, PRECISION: tl.constexpr):
    """Add x @ x^T to total + rest + rest^T; two products are enough, because small @ big^T = (big @ small^T)^T."""
    if PRECISION == "split":
        big, small = split(x)
        total = tl.dot(big, tl.trans(big), acc=total, input_precision="tf32")
        rest = tl.dot(big, tl.trans(small), acc=rest, input_precision="tf32")
    else:
        total += tl.dot(x, tl.trans(x), input_precision=PRECISION)
    return total, rest
