"""A vendor's package as the command sees one: backends behind entry points, most of them bad in one way."""

import dataclasses
import os
import time

import jax.numpy as jnp
from toy_backend import Toy

from paged.common.errors import BackendUnavailableError, BuildFailedError


@dataclasses.dataclass(frozen=True)
class Acme(Toy):
    """Toy attention, with a vice that shows on steps of `rows` rows."""

    name: str = "acme"
    vice: str = ""
    rows: int = 3

    @property
    def capabilities(self):
        declared = super().capabilities
        if self.vice == "no-device":
            return dataclasses.replace(declared, platforms=frozenset({"rocm"}))
        if self.vice == "claims-little":
            return dataclasses.replace(declared, head_dims=frozenset({512}))
        return declared

    def prepare(self):
        if self.vice == "library":
            time.sleep(4)
            return {"library": f"sha256:{os.environ['ACME_LIBRARY']}", "compiler": "acme-cc 1", "machine": ["a", "b"]}
        if self.vice == "build-fails":
            raise BuildFailedError("the kernels do not compile with acme-cc: <expected ';'>")
        return object() if self.vice == "says-nonsense" else None

    def attend(self, query, pool, page_base, static, arrays, spec, extras):
        if static.rows == self.rows:
            if self.vice == "raises":
                raise RuntimeError("no kernel for <three> rows")
            if self.vice == "hangs":
                time.sleep(600)
            if self.vice == "naps":
                time.sleep(8)
            if self.vice == "dies":
                print("about to die", flush=True)
                os.abort()
            if self.vice == "dies-once":
                flag = os.environ["ACME_FLAG"]
                if not os.path.exists(flag):
                    open(flag, "w").close()
                    os.abort()
            if self.vice == "scales-twice":
                spec = dataclasses.replace(spec, scale=spec.scale**2)
        out, lse = super().attend(query, pool, page_base, static, arrays, spec, extras)
        if self.vice == "wrong-dtype":
            out = out.astype(jnp.float32)
        if self.vice == "wrong-shape":
            out = out[:-1]
        return out, lse


def make_backend(vice=""):
    return Acme(name=f"acme-{vice}" if vice else "acme", vice=vice)


def make_unbuilt():
    raise BackendUnavailableError("the kernels are not built. Run acme-build.")
