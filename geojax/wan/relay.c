/* Carries IP packets between two TUN devices as a long link would.
 *
 *   relay FIRST SECOND THERE BACK DELAY JITTER RATE QUEUE CAPACITY LOSS
 *
 * FIRST and SECOND are inherited, non-blocking descriptors of TUN devices with IFF_NO_PI and
 * IFF_VNET_HDR. The direction from the first to the second device has a thread on the core THERE,
 * and the other one on the core BACK. DELAY and JITTER are nanoseconds of one direction; RATE is
 * bytes per second of each direction, 0 for none; QUEUE is how many bytes may wait for the link,
 * CAPACITY how many bytes of buffer a direction has; LOSS is the share of packets that get lost.
 *
 * A direction is a queue in front of a transmitter in front of a wire: a packet waits for those
 * before it, occupies the transmitter for its length / RATE, and is on the wire for DELAY. Queue and
 * transmitter are one number, the time at which the transmitter will be free; so each packet's time
 * of arrival is known when it is read, and the buffer is in order of arrival.
 *
 * With IFF_VNET_HDR the kernel hands over TCP segments of up to 64 KiB that a network card would cut
 * to the MTU. They stay whole, which saves nearly all of the work, but count as what they would be
 * cut to. Checksums that the kernel left open stay open.
 *
 * Waking up costs more than moving a packet, so the relay looks at the devices at most once in a
 * pause, which is a small part of DELAY. A packet that came during a pause counts as come in its
 * middle, and one that should arrive in the first half of the next pause arrives before it: either
 * is wrong by at most half a pause, and by nothing on average.
 *
 * The relay starts when it reads a byte from its standard input, so that one that nobody knows of
 * ends by itself, and ends when a device is gone.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum {
    LARGEST_READ = sizeof(struct virtio_net_hdr) + 65536,
    READS_AT_A_TIME = 256, /* then what has arrived is delivered */
    LONGEST_PAUSE = 500000,
    PAUSES_IN_DELAY = 32,
};

struct packet {
    int64_t arrival; /* nanoseconds on the monotonic clock */
    int64_t bytes;   /* of `content` that are in use */
    uint8_t content[]; /* a virtio_net_hdr and an IP packet */
};

enum { LARGEST_PACKET = sizeof(struct packet) + (LARGEST_READ + 7) / 8 * 8 };

struct direction {
    int source, target, core;
    /* A ring: packets begin below `capacity` and may reach beyond it, where there is room for one. */
    uint8_t *buffer;
    size_t capacity, oldest, free;
    int wrapped; /* `free` has started again from 0, and `oldest` has not yet */
    int64_t transmitter_free, last_arrival;
    uint64_t random;
};

static int64_t delay, jitter, rate, queue, pause_length;
static double loss;

static void give_up(const char *what) {
    perror(what);
    _exit(1); /* the other thread may be giving up too */
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static struct timespec timespec_of(int64_t nanoseconds) {
    return (struct timespec){nanoseconds / 1000000000, nanoseconds % 1000000000};
}

static double random_share(struct direction *way) { /* xorshift64*, of Vigna (2016) */
    way->random ^= way->random >> 12;
    way->random ^= way->random << 25;
    way->random ^= way->random >> 27;
    return (way->random * UINT64_C(0x2545F4914F6CDD1D) >> 11) * 0x1p-53;
}

static void open_way(struct direction *way, int source, int target, int core, size_t capacity) {
    memset(way, 0, sizeof *way);
    way->source = source;
    way->target = target;
    way->core = core;
    way->capacity = capacity;
    way->random = 1 + source;
    way->buffer = mmap(NULL, capacity + LARGEST_PACKET, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (way->buffer == MAP_FAILED) give_up("relay: no memory for the packets on the way");
}

static int is_empty(const struct direction *way) {
    return !way->wrapped && way->oldest == way->free;
}

static int is_full(const struct direction *way) {
    return way->wrapped && way->oldest - way->free < LARGEST_PACKET;
}

static struct packet *oldest(const struct direction *way) {
    return (struct packet *)(way->buffer + way->oldest);
}

static size_t after(const struct packet *packet, size_t place) {
    return place + sizeof *packet + (packet->bytes + 7) / 8 * 8;
}

static void keep(struct direction *way, const struct packet *packet) {
    way->free = after(packet, way->free);
    if (way->free >= way->capacity) {
        way->free = 0;
        way->wrapped = 1;
    }
}

static void forget_oldest(struct direction *way) {
    way->oldest = after(oldest(way), way->oldest);
    if (way->oldest >= way->capacity) {
        way->oldest = 0;
        way->wrapped = 0;
    }
    if (is_empty(way)) way->oldest = way->free = 0; /* touch no more memory than needed */
}

/* Bytes of the IP packets that a network card would make of this one. */
static int64_t bytes_on_wire(const struct packet *packet) {
    struct virtio_net_hdr offload;
    memcpy(&offload, packet->content, sizeof offload);
    int64_t bytes = packet->bytes - sizeof offload;
    if (offload.gso_type == VIRTIO_NET_HDR_GSO_NONE || offload.gso_size == 0) return bytes;
    /* A TCP segment to be cut has an open checksum, which starts with the TCP header. */
    const uint8_t *tcp = packet->content + sizeof offload + offload.csum_start;
    int64_t headers = offload.csum_start + 4 * (tcp[12] >> 4);
    int64_t segments = (bytes - headers + offload.gso_size - 1) / offload.gso_size;
    return bytes + (segments - 1) * headers;
}

/* Set when the packet, which came at `time`, will arrive; 0 if it never will. */
static int schedule(struct direction *way, struct packet *packet, int64_t time) {
    int64_t start = way->transmitter_free > time ? way->transmitter_free : time;
    if (rate) {
        double length = bytes_on_wire(packet);
        if ((start - time) * 1e-9 * rate + length > queue) return 0;
        start += length * 1e9 / rate;
        way->transmitter_free = start;
    }
    if (loss && random_share(way) < loss) return 0;
    packet->arrival = start + delay;
    if (jitter) packet->arrival += jitter * (2 * random_share(way) - 1);
    if (packet->arrival < way->last_arrival) packet->arrival = way->last_arrival;
    way->last_arrival = packet->arrival;
    return 1;
}

/* Read what came: one packet at the time `first`, the others at about `later`. */
static void take_in(struct direction *way, int64_t first, int64_t later) {
    union {
        struct packet packet;
        uint8_t room[LARGEST_PACKET];
    } dropped;
    for (int reads = 0; reads < READS_AT_A_TIME; reads++) {
        int full = is_full(way);
        struct packet *packet = full ? &dropped.packet : (struct packet *)(way->buffer + way->free);
        packet->bytes = read(way->source, packet->content, LARGEST_READ);
        if (packet->bytes < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (packet->bytes <= 0) give_up("relay: a device is gone");
        if (!full && schedule(way, packet, reads ? later : first)) keep(way, packet);
    }
}

/* Write what arrives until `time`. */
static void deliver(struct direction *way, int64_t time) {
    while (!is_empty(way) && oldest(way)->arrival <= time) {
        struct packet *packet = oldest(way);
        /* What the other side refuses is lost, as on a real link; a device that is gone is noticed
           by the next read. */
        if (write(way->target, packet->content, packet->bytes) < 0 && errno == EBADFD)
            give_up("relay: a device is gone");
        forget_oldest(way);
    }
}

/* Carry packets in one direction, for ever. */
_Noreturn static void *carry(void *direction) {
    struct direction *way = direction;
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(way->core, &core);
    if (sched_setaffinity(0, sizeof core, &core)) give_up("relay: the core");
    prctl(PR_SET_TIMERSLACK, 1UL);
    struct pollfd polled = {way->source, POLLIN, 0};
    for (int64_t last_look = 0;;) {
        struct timespec limit = {0};
        if (!is_empty(way)) {
            int64_t wait = oldest(way)->arrival - now();
            limit = timespec_of(wait > 0 ? wait : 0);
        }
        if (ppoll(&polled, 1, is_empty(way) ? NULL : &limit, NULL) < 0 && errno != EINTR)
            give_up("relay: waiting for packets");
        int64_t woken = now(), look = woken;
        if (look < last_look + pause_length) {
            struct timespec end = timespec_of(last_look + pause_length);
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL);
            look = now();
        }
        last_look = look;
        int64_t middle = woken + (look - woken) / 2;
        take_in(way, polled.revents ? woken : middle, middle);
        deliver(way, look + pause_length / 2);
    }
}

int main(int count, char **arguments) {
    if (count != 11) {
        fprintf(stderr,
                "usage: relay FIRST SECOND THERE BACK DELAY JITTER RATE QUEUE CAPACITY LOSS\n");
        return 2;
    }
    int first = atoi(arguments[1]), second = atoi(arguments[2]);
    delay = atoll(arguments[5]);
    jitter = atoll(arguments[6]);
    rate = atoll(arguments[7]);
    queue = atoll(arguments[8]);
    loss = atof(arguments[10]);
    struct direction there, back;
    open_way(&there, first, second, atoi(arguments[3]), atoll(arguments[9]));
    open_way(&back, second, first, atoi(arguments[4]), atoll(arguments[9]));
    pause_length = delay / PAUSES_IN_DELAY < LONGEST_PAUSE ? delay / PAUSES_IN_DELAY : LONGEST_PAUSE;

    char go;
    if (read(STDIN_FILENO, &go, 1) != 1) return 0;
    pthread_t thread;
    /* It inherits the priority that this one has been given before it may go. */
    errno = pthread_create(&thread, NULL, carry, &back);
    if (errno) give_up("relay: the second thread");
    carry(&there);
}
