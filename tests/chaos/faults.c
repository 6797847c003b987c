/* Faults of the disk and of the clock, done to a process from outside: LD_PRELOAD this library.
 *
 * FAULTS_ROOT names a folder; files in it are the disk that faults are done to. FAULTS names another folder, whose
 * files switch the faults on for as long as they exist:
 *
 *   full     writes to the disk fail with ENOSPC
 *   eio      fsync and fdatasync of the disk's files fail with EIO
 *   shadow/  after each sync of a file, its content is copied there: what a power loss would leave
 *   clock    a number of seconds (text) that the wall clock is ahead; the monotonic one is left alone
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const char *root, *faults;

__attribute__((constructor)) static void begin(void) {
    root = getenv("FAULTS_ROOT");
    faults = getenv("FAULTS");
}

static int on(const char *name) {
    char path[PATH_MAX];
    if (!faults) return 0;
    snprintf(path, sizeof path, "%s/%s", faults, name);
    return access(path, F_OK) == 0;
}

/* The path of a descriptor if it is a database file on the disk, else NULL. */
static const char *path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0 || !root) return NULL;
    path[length] = 0;
    return strncmp(path, root, strlen(root)) ? NULL : path;
}

static void keep(const char *path) {
    char kept[PATH_MAX], fresh[PATH_MAX + 8], block[1 << 16];
    snprintf(kept, sizeof kept, "%s/shadow/%s", faults, strrchr(path, '/') + 1);
    snprintf(fresh, sizeof fresh, "%s.new", kept);
    int from = open(path, O_RDONLY | O_CLOEXEC), to = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    ssize_t got;
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    while ((got = read(from, block, sizeof block)) > 0) real(to, block, got);
    close(from);
    close(to);
    rename(fresh, kept);
}

static int synced(int fd, int (*real)(int)) {
    char path[PATH_MAX];
    const char *disk = path_of(fd, path);
    struct stat kind;
    if (!disk || fstat(fd, &kind) || !S_ISREG(kind.st_mode)) return real(fd);
    if (on("eio")) {
        errno = EIO;
        return -1;
    }
    int result = real(fd);
    if (!result && on("shadow")) keep(disk);
    return result;
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    return synced(fd, real);
}

int fdatasync(int fd) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
    return synced(fd, real);
}

static int no_room(int fd) {
    char path[PATH_MAX];
    if (!on("full") || !path_of(fd, path)) return 0;
    errno = ENOSPC;
    return 1;
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    return no_room(fd) ? -1 : real(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite");
    return no_room(fd) ? -1 : real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    return no_room(fd) ? -1 : real(fd, data, size, at);
}

static long ahead(void) {
    char path[PATH_MAX], text[32] = {0};
    if (!faults) return 0;
    snprintf(path, sizeof path, "%s/clock", faults);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    return got > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(now, zone);
    if (!result) now->tv_sec += ahead();
    return result;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
