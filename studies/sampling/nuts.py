"""Sample the posterior of the logistic regression in tests/repulsion/test_logistic_posterior.py with NUTS.

    python -m studies.sampling.nuts

Needs numpyro. Writes means and covariances, which the test compares with a grid and with the chains of SGLD. Takes a
minute on one core.
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path

from studies.output import save
from tests.repulsion.test_logistic_posterior import PRIOR, data

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000, help="samples of each chain")
    parser.add_argument("--warmup", type=int, default=2_000, help="steps that adapt the sampler")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "sampling" / "nuts.json", help="file to write")
    options = parser.parse_args()
    import jax
    import numpy as np
    import numpyro
    from numpyro.diagnostics import effective_sample_size, gelman_rubin
    from numpyro.infer import MCMC, NUTS

    jax.config.update("jax_enable_x64", True)
    x, y = (np.asarray(part.double()) for part in data())

    def potential(theta: jax.Array) -> jax.Array:
        """U = -log likelihood - log prior."""
        logits = x @ theta
        return jax.numpy.sum(jax.nn.softplus(logits) - y * logits) + 0.5 * PRIOR * jax.numpy.sum(theta**2)

    began = time.monotonic()
    sampler = MCMC(
        NUTS(potential_fn=potential),
        num_warmup=options.warmup,
        num_samples=options.samples,
        num_chains=options.chains,
        chain_method="sequential",
        progress_bar=False,
    )
    starts = 0.1 * np.random.default_rng(0).standard_normal((options.chains, 2))
    sampler.run(jax.random.PRNGKey(0), init_params=starts)
    draws = np.asarray(sampler.get_samples(group_by_chain=True))  # [C, N, 2]
    every = draws.reshape(-1, 2)
    result = {
        "command": "python -m studies.sampling.nuts "
        f"--samples {options.samples} --warmup {options.warmup} --chains {options.chains}",
        "versions": {"numpyro": numpyro.__version__, "jax": jax.__version__},
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - began),
        "mean": every.mean(0).tolist(),
        "covariance": np.cov(every.T).tolist(),
        "effective_samples": effective_sample_size(draws).tolist(),
        "gelman_rubin": gelman_rubin(draws).tolist(),
    }
    save(options.out, result)
    print(result)


if __name__ == "__main__":
    main()
