"""A small transformer block in three frameworks, whose parameters are split over a mesh, for tests."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, HEADS, LENGTH = 16, 8, 12
X = np.random.default_rng(0).normal(size=(4, LENGTH, WIDTH)).astype(np.float32)
SPLITS = {"fsdp": ("data", None), "tensor": (None, "model"), "both": ("data", "model")}  # of rows, of columns


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


MESHES = {"auto": mesh_of(AxisType.Auto), "explicit": mesh_of(AxisType.Explicit)}


# A block in each framework, whose parameters are split by (rows, columns); `made` gives its parameters and its loss


class NnxBlock(nnx.Module):
    def __init__(self, rows, columns, biases, rngs):
        def split(*names):
            return {"out_sharding": names}

        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, use_bias=False, rngs=rngs, kernel_metadata=split(rows, columns, None),
            out_kernel_metadata=split(columns, None, rows),
        )  # fmt: skip
        self.up = nnx.Linear(
            WIDTH, 32, rngs=rngs, kernel_metadata=split(rows, columns), bias_metadata=split(columns or biases)
        )
        self.down = nnx.Linear(32, WIDTH, rngs=rngs, kernel_metadata=split(columns, rows), bias_metadata=split(biases))

    def __call__(self, x, narrow=None, wide=None):
        x = x + self.attention(self.norm(x), is_causal=True, out_sharding=narrow, qkv_sharding=wide)
        return x + self.down(nnx.gelu(self.up(x, out_sharding=wide)), out_sharding=narrow)


def made_nnx(mesh, rows, columns, swap):
    explicit = AxisType.Explicit in mesh.axis_types
    out = (P("data"), P("data", None, columns)) if explicit else ()
    with jax.set_mesh(mesh):
        graph, params = nnx.split(swap(NnxBlock(rows, columns, None if explicit else rows, nnx.Rngs(0))))
    return params, lambda params, x: jnp.square(nnx.merge(graph, params)(x, *out)).mean()


class LinenBlock(nn.Module):
    rows: str | None
    columns: str | None

    @nn.compact
    def __call__(self, x):
        def init(*names, of=nn.initializers.lecun_normal()):  # noqa: B008
            return nn.with_partitioning(of, names)

        rows, columns, zeros = self.rows, self.columns, nn.initializers.zeros
        normed = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(
            HEADS, use_bias=False, kernel_init=init(rows, columns, None), out_kernel_init=init(columns, None, rows)
        )(normed, mask=nn.make_causal_mask(x[..., 0]))
        up = nn.Dense(32, kernel_init=init(rows, columns), bias_init=init(columns or rows, of=zeros))(x)
        return x + nn.Dense(WIDTH, kernel_init=init(columns, rows), bias_init=init(rows, of=zeros))(nn.gelu(up))


def made_linen(mesh, rows, columns, swap):
    model = swap(LinenBlock(rows, columns))
    boxed = model.init(jax.random.key(0), X)  # no `set_mesh`: with names of three axes the stock attention fails there
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), nn.get_partition_spec(boxed))
    return jax.device_put(nn.unbox(boxed), shardings), lambda params, x: jnp.square(model.apply(params, x)).mean()


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.up, self.down = eqx.nn.Linear(WIDTH, 32, key=keys[1]), eqx.nn.Linear(32, WIDTH, key=keys[2])

    def __call__(self, x):
        normed = jax.vmap(self.norm)(x)
        x = x + self.attention(normed, normed, normed, jnp.tri(len(x), dtype=bool))
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


def made_equinox(mesh, rows, columns, swap):
    def spec(path, x):
        name = jax.tree_util.keystr(path, simple=True)
        narrow = "output" in name or "down" in name
        if x.ndim == 1:
            return P() if "norm" in name else P(rows if narrow else columns or rows)
        return P(rows, columns) if narrow else P(columns, rows)

    params, rest = eqx.partition(swap(EquinoxBlock(jax.random.key(0))), eqx.is_inexact_array)
    shardings = jax.tree_util.tree_map_with_path(lambda *leaf: NamedSharding(mesh, spec(*leaf)), params)
    params = eqx.filter_shard(params, shardings)
    return params, lambda params, x: jnp.square(jax.vmap(eqx.combine(params, rest))(x)).mean()


MADE = {"nnx": made_nnx, "linen": made_linen, "equinox": made_equinox}
KINDS = [("nnx", "auto"), ("nnx", "explicit"), ("linen", "auto"), ("equinox", "auto")]  # as stock layers run
