# Included by the Makefile: the virtual Slurm cluster.

.PHONY: test-cluster cluster-deps

test-cluster: setup cluster-deps ## two Slurm nodes on this machine (root): real slurmctld, slurmd, srun, requeue
	$(PY) -m pytest -m cluster tests/cluster

# Slurm, munge and iproute2 from the distribution, where they are missing.
cluster-deps:
	@PATH=$$PATH:/usr/sbin; for tool in slurmctld slurmd munged ip; do \
	  command -v $$tool >/dev/null || { tests/cluster/vcluster deps; break; }; done
