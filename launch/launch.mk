# Included by the Makefile: the virtual Slurm cluster.

.PHONY: test-cluster cluster-deps

test-cluster: setup cluster-deps ## two Slurm nodes on this machine (root): real slurmctld, slurmd, srun, requeue
	$(PY) -m pytest -m cluster tests/cluster

# Checkpoints, the long form: ten times SIGKILL of every rank at a random moment, with and without staleness.
.PHONY: test-kills
test-kills: setup ## ten losses of the whole job, resumed exactly (takes about an hour on two cores)
	STALEFLOW_KILLS=10 $(PY) -m pytest tests/fault/checkpoint/test_checkpoint_exact.py

# Slurm, munge and iproute2 from the distribution, where they are missing.
cluster-deps:
	@PATH=$$PATH:/usr/sbin; for tool in slurmctld slurmd munged ip; do \
	  command -v $$tool >/dev/null || { tests/cluster/vcluster deps; break; }; done
