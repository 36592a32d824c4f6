/* A SPANK plugin that makes one machine look like a cluster with pyxis, for tests only.
 *
 * Every task of a job step gets its own mount and host-name namespace: its host name is that of its fake node, and
 * /etc/hosts is the file named by the plugin argument hosts=FILE. The container options of pyxis are accepted; the
 * "image" is the machine itself, but mounts are really mounted and the working directory is really entered.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <slurm/spank.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

SPANK_PLUGIN(fakepyxis, 1);

enum { IMAGE, MOUNTS, WORKDIR, ENV, OPTIONS };
static char *given[OPTIONS], *hosts;

static int remember(int option, const char *value, int remote) {
    given[option] = value ? strdup(value) : NULL;
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "IMAGE", "accepted, not used", 1, IMAGE, remember},
    {"container-mounts", "SRC:DST,...", "bind mounts", 1, MOUNTS, remember},
    {"container-workdir", "PATH", "working directory", 1, WORKDIR, remember},
    {"container-env", "NAMES", "accepted, not used", 1, ENV, remember},
    SPANK_OPTIONS_TABLE_END};

int slurm_spank_init(spank_t job, int argc, char **argv) {
    for (int i = 0; i < argc; i++)
        if (!strncmp(argv[i], "hosts=", 6)) hosts = strdup(argv[i] + 6);
    if (spank_context() == S_CTX_SLURMD || spank_context() == S_CTX_JOB_SCRIPT) return 0;
    for (int i = 0; i < OPTIONS; i++) spank_option_register(job, &options[i]);
    return 0;
}

static int bind(char *mount_point) { /* "SRC:DST[:flags]" */
    char *source = strtok_r(mount_point, ":", &mount_point), *target = strtok_r(NULL, ":", &mount_point);
    struct stat found;
    if (!target || !strcmp(source, target)) return 0;
    if (stat(source, &found)) {
        slurm_error("fakepyxis: mount source %s does not exist", source);
        return -1;
    }
    char path[4096];
    snprintf(path, sizeof path, "%s", target);
    for (char *slash = path + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        mkdir(path, 0755);
    }
    if (S_ISDIR(found.st_mode)) mkdir(target, 0755);
    if (!mount(source, target, NULL, MS_BIND | MS_REC, NULL)) return 0;
    slurm_error("fakepyxis: cannot mount %s on %s: %m", source, target);
    return -1;
}

int slurm_spank_task_init(spank_t job, int argc, char **argv) {
    uint32_t step = 0;
    char node[256] = "";
    spank_get_item(job, S_JOB_STEPID, &step);
    if (step >= 0xfffffff0u) return 0; /* the batch script keeps the machine's own name: its srun listens on it */
    spank_getenv(job, "SLURMD_NODENAME", node, sizeof node);
    if (unshare(CLONE_NEWNS | CLONE_NEWUTS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) {
        slurm_error("fakepyxis: no namespaces: %m");
        return -1;
    }
    if (*node) sethostname(node, strlen(node));
    if (hosts) mount(hosts, "/etc/hosts", NULL, MS_BIND, NULL);
    char *rest = given[MOUNTS];
    for (char *one; rest && (one = strsep(&rest, ","));)
        if (*one && bind(one)) return -1;
    if (given[WORKDIR] && chdir(given[WORKDIR])) {
        slurm_error("fakepyxis: cannot enter %s: %m", given[WORKDIR]);
        return -1;
    }
    return 0;
}
